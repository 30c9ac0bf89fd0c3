"""A model with a 4-bit weight packed as float16 is cast to bfloat16."""

from __future__ import annotations


def case(work: str) -> str | None:
    import bitsandbytes as bnb
    import torch

    from ..models import four_bit

    where = four_bit.device(torch.float16)
    torch.manual_seed(0)
    options = {"quant_type": "nf4", "compute_dtype": torch.float32, "quant_storage": torch.float16}
    layer = bnb.nn.Linear4bit(64, 64, **options).to(where)
    state = layer.weight.quant_state
    with torch.no_grad():
        expected = bnb.functional.dequantize_4bit(layer.weight.data, state)
        torch.nn.Sequential(layer).bfloat16()
        weights = bnb.functional.dequantize_4bit(layer.weight.data, state)
    off = (weights - expected).abs().max().item()
    assert off == 0, f"maximum error of the weights: {off:.2g}"
    return "the 4-bit weights are unchanged, the bias is cast"
