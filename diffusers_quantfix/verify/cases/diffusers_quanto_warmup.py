"""A Flux transformer with quanto weights is saved, and loaded onto a named device."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    cuda("nothing is warmed up for the CPU")

    import diffusers

    from ..models import quanto_models

    model = quanto_models.flux(f"{work}/plain", "int8")
    model.save_pretrained(f"{work}/saved")
    again = diffusers.FluxTransformer2DModel.from_pretrained(
        f"{work}/saved", torch_dtype=torch.float32, device_map="cuda"
    )
    places = {str(parameter.device) for parameter in again.parameters()}
    assert places == {"cuda:0"}, f"the model is on {', '.join(sorted(places))}"
    return "loaded onto cuda:0"
