"""Taking a LoRA out of weights of bitsandbytes does not give these weights back.

Symptom: after ``unfuse_lora()`` or ``unmerge_adapter()`` the output of a 4-bit or 8-bit model is not what it was before
    ``fuse_lora()`` or ``merge_adapter()``, and differs more each time.
Cause: ``merge`` and ``unmerge`` dequantize the weight, add or subtract the product of the LoRA, and quantize the sum
    anew. Each time all values are rounded, other ones in each block as its greatest value is another.
Upstream: not reported; both warn that there are rounding errors.
Patch: the packed weight from before the first merge is kept on the CPU until the last adapter is taken out, and then is
    the weight again, wherever that is now. If it was given other values in between, if a merged adapter was deleted, or
    if the CPU has no memory to keep it (logged once), upstream's way is left. When either fails, the layer is what it
    was.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_bnb import leave_their_bits, round_again
from ...engine.draft import Draft
from ...engine.fix import Fix

FIX = Fix(
    id="peft-unmerge-bnb",
    title="taking a LoRA out of weights of bitsandbytes does not give these weights back",
    module="peft.tuners.lora.bnb",
    claims={"peft": ">=0.8.0,<=0.21.2", "bitsandbytes": ""},
    upstream=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/bnb.py",),
    symptom="after unfuse_lora() or unmerge_adapter() the output of a bitsandbytes model is not what it was before",
    harm="wrong result",
    frames=("unfuse_lora|unmerge_adapter|unmerge", "bitsandbytes|nf4|int8|[48].?bit"),
    hot=True,
)


def broken(bnb: ModuleType) -> bool:
    """Does ``unmerge`` of a class quantize, with nothing of ours around it?"""
    return round_again(bnb)


def patch(bnb: ModuleType, draft: Draft) -> None:
    leave_their_bits(bnb, draft)
