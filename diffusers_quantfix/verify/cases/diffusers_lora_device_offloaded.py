"""The device of a LoRA is set while its model is sequentially offloaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import lora

    pipe = lora.load(lora.pipeline())
    expected = lora.run(pipe)
    lora.offload(pipe.transformer)
    pipe.set_lora_device(["lora"], "cpu")
    assert torch.equal(lora.run(pipe), expected), "the output changed"
    return "the LoRA is still offloaded; output exact"
