"""A transformer on the CPU is passed to a pipeline that is loaded with ``device_map="balanced"``."""

from __future__ import annotations

from ..models import flux
from ..models.devices import cuda


def case(work: str) -> str | None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    cuda("the pipeline is loaded onto it")
    transformer = flux.transformer()
    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    FluxPipeline(FlowMatchEulerDiscreteScheduler(), transformer=transformer, **absent).save_pretrained(work)
    pipe = FluxPipeline.from_pretrained(
        work, transformer=transformer, device_map="balanced", max_memory={0: 10**8}, **absent
    )
    places = {str(tensor.device) for tensor in transformer.parameters()}
    planned = pipe.hf_device_map["transformer"]
    assert places == {f"cuda:{planned}"}, (
        f"hf_device_map has the transformer on GPU {planned}, it is on {', '.join(sorted(places))}"
    )
    return f"the transformer is on {places.pop()}, as hf_device_map says"
