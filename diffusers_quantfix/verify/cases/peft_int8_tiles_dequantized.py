"""peft dequantizes an 8-bit weight after a run, to merge a LoRA into it."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft.utils.integrations import dequantize_bnb_weight

    from ..models import eight_bit

    return eight_bit.dequantized_after_a_run(dequantize_bnb_weight)
