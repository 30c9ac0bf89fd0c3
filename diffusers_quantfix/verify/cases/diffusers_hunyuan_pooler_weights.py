"""The pooling layer of HunyuanDiT has 4-bit layers."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.models.embeddings import HunyuanDiTAttentionPool

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    pool = HunyuanDiTAttentionPool(4, 64, 2).to(where).eval()
    inputs = torch.randn(2, 4, 64, device=where)
    with torch.no_grad():
        expected = pool(inputs)
        for name in ("q_proj", "k_proj", "v_proj", "c_proj"):
            setattr(pool, name, four_bit.linear(getattr(pool, name), where))
        error = ((pool(inputs) - expected).norm() / expected.norm()).item()
    assert error < 0.3, f"differs by {error:.0%}"
    return "runs"
