"""A weight of an 8-bit model is dequantized after a run."""

from __future__ import annotations


def case(work: str) -> str | None:
    from diffusers.quantizers.bitsandbytes.utils import dequantize_bnb_weight

    from ..models import eight_bit

    where = eight_bit.cuda_device()
    model = eight_bit.layers(where, 1)
    rows = model[0].weight.data.clone()
    scales = model[0].weight.SCB.view(-1, 1)
    eight_bit.run(model, where)
    weight = dequantize_bnb_weight(model[0].weight, state=model[0].state)
    off = (weight.float() - rows * scales / 127).abs().max().item()
    assert off < 1e-3, f"the dequantized weight is off by {off:.2g}"
    return "the dequantized weight is that of the rows"
