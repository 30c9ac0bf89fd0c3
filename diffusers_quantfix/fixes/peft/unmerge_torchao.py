"""Taking a LoRA out of weights of torchao does not give these weights back.

Symptom: after ``unfuse_lora()`` or ``unmerge_adapter()`` the output of a model with weights of torchao is not what it
    was before ``fuse_lora()`` or ``merge_adapter()``, and differs more each time.
Cause: ``merge`` and ``unmerge`` dequantize the weight, add or subtract the product of the LoRA, and quantize the sum
    anew. Each time all values are rounded, other ones as the greatest value of each row or group is another.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/torchao.py; not reported.
Patch: the packed weight from before the first merge is kept on the CPU until the last adapter is taken out, and then is
    the weight again, wherever that is now. If it was given other values in between, if a merged adapter was deleted, or
    if the CPU has no memory to keep it (logged once), upstream's way is left. When either fails, the layer is what it
    was.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.before_merge import forgets_deleted, keeps_bits, puts_bits_back, rounds_again
from ...adapters.merging_torchao import bits_of, put
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="peft-unmerge-torchao",
    module="peft.tuners.lora.torchao",
    claims={"peft": ">=0.14.0,<=0.21.2", "torchao": ""},
    harm="wrong result",
    frames=("unfuse_lora|unmerge_adapter|unmerge", "torchao"),
    hot=True,
)


def broken(torchao: ModuleType) -> bool:
    """Does ``unmerge`` quantize, with nothing of ours around it?"""
    resolve(torchao, "TorchaoLoraLinear.unmerge")
    return rounds_again(torchao.TorchaoLoraLinear, "quantize_")


def patch(torchao: ModuleType, draft: Draft) -> None:
    cls = torchao.TorchaoLoraLinear
    draft.wrap_plain(cls, "merge", keeps_bits(bits_of))
    draft.wrap_plain(cls, "unmerge", puts_bits_back(bits_of, put))
    draft.wrap_plain(cls, "delete_adapter", forgets_deleted)
