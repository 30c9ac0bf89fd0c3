"""A LoKr is merged into quanto weights, and unmerged."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import LoKrConfig

    from ..models import quanto_models

    config = LoKrConfig(r=64, target_modules=["0", "1"], init_weights=False)
    return quanto_models.merged_and_unmerged(config)
