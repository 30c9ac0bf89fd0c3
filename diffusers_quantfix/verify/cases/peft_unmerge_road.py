"""A RoAd is merged into an 8-bit bitsandbytes weight, and unmerged."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import RoadConfig

    from ..models import eight_bit

    return eight_bit.merged_and_unmerged(RoadConfig(group_size=16, target_modules=["0"]))
