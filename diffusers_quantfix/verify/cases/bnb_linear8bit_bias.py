"""A 8-bit layer with a float32 bias runs once in bfloat16."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Linear8bitLt

    from ..models import eight_bit

    device = eight_bit.device()
    layer = Linear8bitLt(64, 64, has_fp16_weights=False).to(device)
    with torch.no_grad():
        layer(torch.ones(1, 64, dtype=torch.bfloat16, device=device))
    assert layer.bias.dtype == torch.float32, f"the bias became {layer.bias.dtype}"
    return "a layer keeps its bias"
