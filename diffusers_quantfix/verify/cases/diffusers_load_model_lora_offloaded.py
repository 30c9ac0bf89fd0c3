"""A LoRA is loaded into a model under sequential offload."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    import torch

    from ..models import lora

    pipe = lora.pipeline()
    weights = lora.weights(pipe.transformer, "transformer")
    if not hasattr(pipe.transformer, "load_lora_adapter"):
        raise CannotReproduce("this diffusers loads a LoRA into pipelines only")
    expected = lora.run(lora.load(pipe))
    pipe.unload_lora_weights()
    lora.offload(pipe.transformer)
    pipe.transformer.load_lora_adapter(weights, adapter_name="lora")
    assert torch.equal(lora.run(pipe), expected), "the output differs"
    return "the output equals that of the model that was not offloaded"
