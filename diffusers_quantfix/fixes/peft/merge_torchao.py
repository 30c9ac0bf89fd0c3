"""A DoRA, or several LoRAs, cannot be merged into torchao weights.

Symptom: after ``fuse_lora()`` or ``merge_and_unload()`` of a DoRA the output of a model with torchao weights is wrong;
    with two LoRAs: UnboundLocalError "cannot access local variable 'weight' where it is not associated with a value"
    (before Python 3.11: "local variable 'weight' referenced before assignment"), and the first one stays merged in the
    first layer; KeyError with the name of a LoRA that is not on all of the other one's layers.
Cause: ``TorchaoLoraLinear.merge`` adds only the LoRA's product, whatever else its variant does, deletes the weight
    variable after the first adapter, and computes the product even of an adapter that the layer does not have.
Upstream: https://github.com/huggingface/peft/issues/3728, open, and https://github.com/huggingface/peft/pull/3729,
    closed, are about several adapters; the rest is not reported.
Patch: in these cases the layer has a plain weight while the method of its base class, peft's layer for plain weights,
    merges or unmerges; then it is quantized again, as upstream does. If that fails, the layer is restored.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_torchao import as_plain_layers_do, knows_no_variants
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import merged_adapters as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="peft-merge-torchao",
    module="peft.tuners.lora.torchao",
    claims={"peft": ">=0.14.0,<=0.21.2", "torchao": ""},
    patterns=(
        "cannot access local variable 'weight' where it is not associated with a value",
        "local variable 'weight' referenced before assignment",
    ),
    harm="wrong result",
    frames=("peft/tuners/lora/torchao.py|merge_and_unload|fuse_lora", "torchao"),
    hot=True,
    asked_once=True,
)


def broken(torchao: ModuleType) -> bool:
    """Does ``merge`` treat a DoRA as a LoRA?"""
    resolve(torchao, "TorchaoLoraLinear.merge")
    return knows_no_variants(torchao.TorchaoLoraLinear)


def patch(torchao: ModuleType, draft: Draft) -> None:
    cls = torchao.TorchaoLoraLinear
    for verb in ("merge", "unmerge"):
        draft.wrap_plain(cls, verb, as_plain_layers_do(cls, verb))
