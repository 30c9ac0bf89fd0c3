"""An OFT is merged into an 8-bit bitsandbytes weight, and unmerged."""

from __future__ import annotations


def case(work: str) -> str | None:
    from peft import OFTConfig

    from ..models import eight_bit

    return eight_bit.merged_and_unmerged(OFTConfig(r=0, oft_block_size=8, target_modules=["0"]))
