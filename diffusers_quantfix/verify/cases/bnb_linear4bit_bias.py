"""A 4-bit layer whose compute dtype is not the dtype of its bias runs once."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Linear4bit

    from ..models import eight_bit

    device = eight_bit.device()
    layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to(torch.float16).to(device)
    layer(torch.ones(1, 64, dtype=torch.float16, device=device))
    assert layer.bias.dtype == torch.float16, f"the bias became {layer.bias.dtype}"
    return "a 4-bit layer keeps its bias"
