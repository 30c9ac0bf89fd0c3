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
    assert off < 1e-5, f"maximum error {off:.2g} after fuse_lora"
    return f"fused the output is that without offload (maximum error {off:.1g})"
