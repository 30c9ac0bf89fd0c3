"""A modular pipeline with an 8-bit transformer is moved to the CPU."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline
    from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec

    from ..models import eight_bit

    where = cuda()
    model = eight_bit.transformer(work, where)
    pipe = ModularPipeline.__new__(ModularPipeline)  # only the attributes that `to` reads
    specs = {"transformer": ComponentSpec(name="transformer", type_hint=type(model))}
    vars(pipe).update(_component_specs=specs, transformer=model, hf_device_map=None)
    pipe.to("cpu", silence_dtype_warnings=True)
    assert model.device.type == "cpu", f"after pipe.to('cpu') the transformer is on {model.device}"
    return "pipe.to('cpu') moves the 8-bit transformer"
