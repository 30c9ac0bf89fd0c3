"""A LoRA is fused into a sequentially offloaded pipeline, and unfused."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import lora

    pipes = [lora.load(lora.pipeline()) for _ in range(2)]
    lora.offload(pipes[1].transformer)
    off = []
    for verb in ("fuse_lora", "unfuse_lora"):
        for pipe in pipes:
            getattr(pipe, verb)(components=["transformer"])
        expected, result = (lora.run(pipe) for pipe in pipes)
        off.append((result - expected).abs().max().item())
    assert max(off) < 1e-5, f"maximum error {off[0]:.2g} after fuse_lora, {off[1]:.2g} after unfuse_lora"
    return f"fused and unfused the output is that without offload (maximum error {max(off):.1g})"
