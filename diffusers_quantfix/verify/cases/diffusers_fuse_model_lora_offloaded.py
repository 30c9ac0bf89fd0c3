"""A LoRA is fused into a sequentially offloaded model by the model's own method."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import lora

    pipes = [lora.load(lora.pipeline()) for _ in range(2)]
    lora.offload(pipes[1].transformer)
    for pipe in pipes:
        pipe.transformer.fuse_lora()
    expected, result = (lora.run(pipe) for pipe in pipes)
    off = (result - expected).abs().max().item()
    assert off < 1e-5, f"off by {off} after fuse_lora"
    return f"fused it gives what it gives without offload (off by {off:.1g})"
