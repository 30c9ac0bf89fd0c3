"""A Custom Diffusion processor on an attention with a 4-bit query layer."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.models import attention_processor

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    attention = attention_processor.Attention(64, heads=2, dim_head=32).to(where).eval()
    processor = attention_processor.CustomDiffusionAttnProcessor(train_kv=False, train_q_out=False)
    inputs = torch.randn(2, 4, 64, device=where)
    with torch.no_grad():
        # Otherwise every token attends to all others equally, whatever its query is.
        for layer in (attention.to_q, attention.to_k):
            layer.weight.normal_(std=0.3)
        expected = processor(attention, inputs)
        attention.to_q = four_bit.linear(attention.to_q, where)
        error = ((processor(attention, inputs) - expected).norm() / expected.norm()).item()
    assert error < 0.3, f"differs by {error:.0%}"
    return "runs"
