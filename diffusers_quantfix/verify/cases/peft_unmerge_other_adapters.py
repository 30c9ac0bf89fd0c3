"""A VeRA is merged into a 4-bit bitsandbytes weight, and unmerged."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import VeraConfig

    from ..models import four_bit

    return four_bit.merged_and_unmerged(
        VeraConfig(r=8, target_modules=["0"], d_initial=1.0, init_weights=False)
    )
