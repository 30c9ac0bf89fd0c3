"""A LoRA is merged into quanto weights, and unmerged."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoraConfig

    from ..models import quanto_models

    config = LoraConfig(r=8, target_modules=["0", "1"], init_lora_weights=False)
    return quanto_models.merged_and_unmerged(config)
