"""A modular pipeline with a 4-bit transformer and a sequentially offloaded text encoder is moved to the GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    from accelerate import cpu_offload
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline
    from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec

    from ..models import four_bit, lora

    where = four_bit.device()
    plain = lora.pipeline().transformer
    parts = {"transformer": plain, "text_encoder": four_bit.text_encoder(f"{work}/text_encoder", where)}
    pipe = ModularPipeline.__new__(ModularPipeline)  # only the attributes that `to` reads
    specs = {name: ComponentSpec(name=name, type_hint=type(part)) for name, part in parts.items()}
    vars(pipe).update(_component_specs=specs, hf_device_map=None, **parts)
    cpu_offload(pipe.text_encoder, where)
    places = [weight.device for weight in plain.parameters()]
    try:
        pipe.to("cuda")
    except ValueError as error:
        assert "you have activated sequential model offloading" in str(error), str(error)
    else:
        raise AssertionError("the pipeline was moved")
    assert places == [weight.device for weight in plain.parameters()]
    return 'pipe.to("cuda") raises an error about sequential offload, before anything is moved'
