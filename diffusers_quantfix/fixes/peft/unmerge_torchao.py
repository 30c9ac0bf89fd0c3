"""Unmerging a LoRA from torchao weights does not restore the weights.

Symptom: after ``unfuse_lora()`` or ``unmerge_adapter()`` the output of a model with torchao weights is not what it was
    before ``fuse_lora()`` or ``merge_adapter()``, and differs more each time.
Cause: ``merge`` and ``unmerge`` dequantize the weight, add or subtract the LoRA's product, and quantize the sum again.
    Each time all values are rounded, and differently as the largest value of each row or group changes.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/torchao.py; not reported.
Patch: the packed weight from before the first merge is kept on the CPU until the last adapter is unmerged, and then
    becomes the weight again, on its current device. If the weight was changed in between, if a merged adapter was
    deleted, or if the CPU has no memory to keep it (logged once), upstream's method remains. If either fails, the layer
    is restored.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.before_merge import forgets_deleted, keeps_bits, puts_bits_back, rounds_again
from ...adapters.merging_torchao import bits_of, put
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import merged_adapters as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="peft-unmerge-torchao",
    module="peft.tuners.lora.torchao",
    claims={"peft": ">=0.14.0,<=0.21.2", "torchao": ""},
    harm="wrong result",
    frames=("unfuse_lora|unmerge_adapter|unmerge", "torchao"),
    hot=True,
    asked_once=True,
)


def broken(torchao: ModuleType) -> bool:
    """Does ``unmerge`` quantize?"""
    resolve(torchao, "TorchaoLoraLinear.unmerge")
    return rounds_again(torchao.TorchaoLoraLinear, "quantize_")


def patch(torchao: ModuleType, draft: Draft) -> None:
    cls = torchao.TorchaoLoraLinear
    draft.wrap_plain(cls, "merge", keeps_bits(bits_of))
    draft.wrap_plain(cls, "unmerge", puts_bits_back(bits_of, put))
    draft.wrap_plain(cls, "delete_adapter", forgets_deleted)
