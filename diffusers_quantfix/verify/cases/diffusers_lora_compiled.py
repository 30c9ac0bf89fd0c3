"""The LoRA of a compiled transformer is switched off."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import lora

    pipe = lora.pipeline()
    without = lora.run(pipe)
    lora.load(pipe)
    pipe.transformer = torch.compile(
        pipe.transformer, backend="eager"
    )  # compiled by its first call, which is not made
    pipe.disable_lora()
    pipe.transformer = pipe.transformer._orig_mod
    assert torch.equal(lora.run(pipe), without), "the LoRA is still on"
    return "it is off"
