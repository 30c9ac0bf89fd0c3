"""A LoKr on a model under sequential offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from peft import LoKrConfig

    from ..models import lora

    pipe = lora.pipeline()
    lora.run_with(pipe, LoKrConfig)
    expected = lora.run(pipe)
    lora.offload(pipe.transformer)
    for _ in range(2):
        assert torch.equal(lora.run(pipe), expected), "the output differs"
    return "runs, and equals the model that was not offloaded"
