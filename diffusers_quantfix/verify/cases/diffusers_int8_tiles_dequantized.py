"""A weight of an 8-bit diffusers model is dequantized after a run."""

from __future__ import annotations


def case(work: str) -> str | None:
    from diffusers.quantizers.bitsandbytes.utils import dequantize_bnb_weight

    from ..models import eight_bit

    return eight_bit.dequantized_after_a_run(dequantize_bnb_weight)
