"""The attention of ControlNetUnion has a 4-bit output layer."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.models.controlnets.controlnet_union import ResidualAttentionBlock

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    block = ResidualAttentionBlock(64, 2).to(where).eval()
    inputs = torch.randn(4, 2, 64, device=where)
    with torch.no_grad():
        expected = block.attention(inputs)
        block.attn.out_proj = four_bit.linear(block.attn.out_proj, where)
        error = ((block.attention(inputs) - expected).norm() / expected.norm()).item()
    assert error < 0.3, f"differs by {error:.0%}"
    return "runs"
