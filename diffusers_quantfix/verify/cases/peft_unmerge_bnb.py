"""A LoRA is merged into a 4-bit weight of bitsandbytes, and taken out again."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoraConfig

    from ..models import four_bit

    return four_bit.merged_and_taken_out(LoraConfig(r=8, target_modules=["0"], init_lora_weights=False), 0.1)
