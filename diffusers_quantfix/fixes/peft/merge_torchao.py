"""A DoRA, or several LoRAs, cannot be merged into weights of torchao.

Symptom: after ``fuse_lora()`` or ``merge_and_unload()`` of a DoRA the output of a model with weights of torchao is
    wrong; with two LoRAs: UnboundLocalError "cannot access local variable 'weight' where it is not associated with a
    value" (before Python 3.11: "local variable 'weight' referenced before assignment"), and the first one stays merged
    in the first layer; KeyError with the name of a LoRA that is not on all layers which the other one is on.
Cause: ``TorchaoLoraLinear.merge`` adds the product of the LoRA, whatever else its variant does, deletes the variable of
    the weight after the first adapter, and asks for the product of an adapter that the layer has not.
Upstream: https://github.com/huggingface/peft/issues/3728, open, and https://github.com/huggingface/peft/pull/3729,
    closed, of several adapters; the rest is not reported.
Patch: in these cases the layer has a plain weight while the method of its base class, peft's layer of plain weights,
    merges or takes out; then it is quantized anew, as upstream does it. When that fails, the layer is what it was.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_torchao import as_plain_layers_do, knows_no_variants
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

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
)


def broken(torchao: ModuleType) -> bool:
    """Does ``merge`` treat a DoRA as a LoRA, with nothing of ours around it?"""
    resolve(torchao, "TorchaoLoraLinear.merge")
    return knows_no_variants(torchao.TorchaoLoraLinear)


def patch(torchao: ModuleType, draft: Draft) -> None:
    cls = torchao.TorchaoLoraLinear
    for verb in ("merge", "unmerge"):
        draft.wrap_plain(cls, verb, as_plain_layers_do(cls, verb))
