"""Taking a PVeRA out of weights of bitsandbytes does not give these weights back.

Symptom: after ``unmerge_adapter()`` of a PVeRA the output of an 8-bit model is not what it was before
    ``merge_adapter()``, and differs more each time.
    Into 4-bit weights a PVeRA cannot be merged (``peft-merge-other-adapters``).
Cause: ``merge`` and ``unmerge`` dequantize the weight, add or subtract the product of the adapter,
    and quantize the result anew. Each time all values are rounded.
Upstream: not reported.
Patch: that of ``peft-unmerge-bnb``: the packed weight from before the first merge is kept on the CPU until the last
    adapter is taken out.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_bnb import leave_their_bits, round_again
from ...engine.draft import Draft
from ...engine.fix import Fix

FIX = Fix(
    id="peft-unmerge-pvera",
    title="taking a PVeRA out of weights of bitsandbytes does not give these weights back",
    module="peft.tuners.pvera.bnb",
    claims={"peft": ">=0.19.0,<=0.21.2", "bitsandbytes": ""},
    upstream=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/pvera/bnb.py",),
    symptom="after unmerge_adapter() of a PVeRA the output of a bitsandbytes model is not what it was before",
    harm="wrong result",
    frames=("unmerge_adapter|unmerge", r"\bPVeRA\b|tuners/pvera/"),
    hot=True,
    since="0.1.0",
)


def broken(bnb: ModuleType) -> bool:
    """Does ``unmerge`` of a class quantize, with nothing of ours around it?"""
    return round_again(bnb)


def patch(bnb: ModuleType, draft: Draft) -> None:
    leave_their_bits(bnb, draft)
