"""A LoRA is merged into a 4-bit bitsandbytes weight, and unmerged."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoraConfig

    from ..models import four_bit

    return four_bit.merged_and_unmerged(LoraConfig(r=8, target_modules=["0"], init_lora_weights=False), 0.1)
