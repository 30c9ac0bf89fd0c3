"""A 4-bit text encoder is moved; its hooks must send the inputs to the new device."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from ..models import four_bit, hooked

    model = four_bit.text_encoder(work, cuda())
    return hooked.move_to_cpu(model)
