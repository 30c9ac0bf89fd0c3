"""An 8-bit Flux transformer is moved; its hooks must send the inputs to the new device."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from ..models import eight_bit, hooked

    model = eight_bit.transformer(work, cuda())
    return hooked.move_to_cpu(model)
