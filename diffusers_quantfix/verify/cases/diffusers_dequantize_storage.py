"""A 4-bit weight whose bytes are stored as float16 is dequantized."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Linear4bit
    from diffusers.quantizers.bitsandbytes.utils import dequantize_bnb_weight

    from ..models import four_bit

    layer = Linear4bit(64, 64, quant_type="nf4", quant_storage=torch.float16).bfloat16()
    layer.to(four_bit.device(torch.float16))
    # as `dequantize()` calls it: with the dtype of the model's packed weights
    dtype = dequantize_bnb_weight(layer.weight, dtype=layer.weight.dtype).dtype
    assert dtype == torch.bfloat16, f"the weight was bfloat16, and is {dtype}"
    return "the weight has the dtype that it was quantized from"
