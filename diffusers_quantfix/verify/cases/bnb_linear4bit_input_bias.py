"""A 4-bit layer with a float32 bias runs once in bfloat16."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Linear4bit

    from ..models import eight_bit

    device = eight_bit.device()
    layer = Linear4bit(64, 64, compute_dtype=torch.bfloat16, quant_type="nf4").to(device)
    with torch.no_grad():
        layer(torch.ones(1, 64, dtype=torch.bfloat16, device=device))
    assert layer.bias.dtype == torch.float32, f"the bias became {layer.bias.dtype}"
    return "a layer keeps its bias"
