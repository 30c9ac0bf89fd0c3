"""A transformer is loaded onto the GPU by a device_map; its pipeline is moved there, and the transformer elsewhere."""

from __future__ import annotations

from ..models import flux
from ..models.devices import cuda


def case(work: str) -> str | None:
    from diffusers import DiffusionPipeline, FluxTransformer2DModel

    flux.transformer().save_pretrained(work)
    model = FluxTransformer2DModel.from_pretrained(work, device_map={"": str(cuda())})

    class Pipeline(DiffusionPipeline):
        def __init__(self, transformer):
            super().__init__()
            self.register_modules(transformer=transformer)

    Pipeline(model).to(cuda())
    model.to("cpu")
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    places = {str(hook.execution_device) for hook in hooks}
    assert places <= {"cpu"}, f"the model is on the CPU, its hooks send the inputs to {places}"
    return "the pipeline was moved, and the hooks send the inputs to where the model is"
