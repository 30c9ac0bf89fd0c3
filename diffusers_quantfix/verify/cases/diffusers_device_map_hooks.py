"""A transformer is loaded onto the GPU by a device_map; its pipeline is moved there, and the transformer elsewhere."""

from __future__ import annotations

from ..models import flux, hooked, one_model
from ..models.devices import cuda


def case(work: str) -> str | None:
    from diffusers import FluxTransformer2DModel

    flux.transformer().save_pretrained(work)
    model = FluxTransformer2DModel.from_pretrained(work, device_map={"": str(cuda())})
    one_model.pipeline(model).to(cuda())
    return f"the pipeline was moved, and {hooked.move_to_cpu(model)}"
