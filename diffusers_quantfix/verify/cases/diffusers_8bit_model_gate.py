"""An 8-bit Flux transformer is loaded and moved to the CPU."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from ..models import eight_bit

    where = cuda()
    model = eight_bit.transformer(work, where)
    model.to("cpu")
    places = {str(parameter.device) for parameter in model.parameters()}
    assert places == {"cpu"}, f"the model is on {', '.join(sorted(places))}"
    return "loaded an 8-bit transformer and moved it to the CPU"
