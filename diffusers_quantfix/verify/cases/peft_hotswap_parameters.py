"""A LoRA of a larger rank is swapped in, and the model is offloaded sequentially."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    import inspect

    import torch

    from ..models import lora

    pipe = lora.pipeline()
    if "hotswap" not in inspect.signature(pipe.load_lora_into_transformer).parameters:
        raise CannotReproduce("this diffusers has no hotswap")
    new = {
        name: 2 * torch.cat([weight, weight], dim=int(".lora_B." in name))
        for name, weight in lora.weights(pipe.transformer, "transformer").items()
    }
    pipe.load_lora_weights(dict(new), adapter_name="lora")
    expected = lora.run(pipe)
    pipe.unload_lora_weights()
    lora.load(pipe).load_lora_weights(dict(new), adapter_name="lora", hotswap=True)
    lora.offload(pipe.transformer)
    assert torch.equal(lora.run(pipe), expected), "the output differs"
    return "the output equals that of the LoRA loaded first"
