"""Taking an OFT out of weights of bitsandbytes does not give these weights back.

Symptom: after ``unmerge_adapter()`` of an OFT the output of a 4-bit or 8-bit model is not what it was before
    ``merge_adapter()``, and differs more each time.
Cause: ``merge`` and ``unmerge`` dequantize the weight, multiply it with the rotation of the adapter or its inverse, and
    quantize the result anew. Each time all values are rounded.
Upstream: not reported. From 0.21 on: ``peft-unmerge-other-adapters``; in 0.20 an OFT cannot be added to these layers.
Patch: that of ``peft-unmerge-bnb``: the packed weight from before the first merge is kept on the CPU until the last
    adapter is taken out.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_bnb import leave_their_bits, round_again
from ...engine.draft import Draft
from ...engine.fix import Fix

FIX = Fix(
    id="peft-unmerge-oft",
    title="taking an OFT out of weights of bitsandbytes does not give these weights back",
    module="peft.tuners.oft.bnb",
    claims={"peft": ">=0.16.0,<0.21.0", "bitsandbytes": ""},
    upstream=("https://github.com/huggingface/peft/blob/v0.18.1/src/peft/tuners/oft/bnb.py",),
    symptom="after unmerge_adapter() of an OFT the output of a bitsandbytes model is not what it was before, with peft "
    "before 0.21",
    harm="wrong result",
    frames=("unmerge_adapter|unmerge", r"tuners/oft/bnb\.py"),
    hot=True,
    fixed_in="peft 0.21.0",  # in so far as its class is another one there, with peft-unmerge-other-adapters
    since="0.1.0",
)


def broken(bnb: ModuleType) -> bool:
    """Does ``unmerge`` of a class quantize, with nothing of ours around it?"""
    return round_again(bnb)


def patch(bnb: ModuleType, draft: Draft) -> None:
    leave_their_bits(bnb, draft)
