"""``cuda()`` of a 4-bit text encoder on the CPU must move it, and return it."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from ..models import four_bit

    model = four_bit.text_encoder(work, cuda())
    model.to("cpu")
    assert model.cuda() is model, "cuda() does not return the model"
    places = {parameter.device.type for parameter in model.parameters()}
    assert places == {"cuda"}, f"after cuda() the weights are on {places}"
    return "cuda() moves the model and returns it"
