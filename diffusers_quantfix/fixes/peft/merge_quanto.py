"""Merging a LoRA into weights of optimum-quanto has no effect, and switches the LoRA off.

Symptom: after ``fuse_lora()``, ``merge_adapter()`` or ``merge_and_unload()`` of a model with weights of quanto the
    output is that without a LoRA.
Cause: ``merge`` adds the product of the LoRA to ``base_layer.weight.data``. For a tensor of quanto the sum is a new,
    dequantized tensor, and assigning it to ``.data`` changes nothing that the layer uses; the adapter counts as merged.
Upstream: not reported; peft has layers of its own for other quantization methods, and none for quanto.
Patch: while peft merges, the layer has a plain weight; then it is quantized anew, as quanto quantizes it. The packed
    weight from before is kept in host memory until the adapter is taken out or unloaded, so that unmerging gives the
    very same bits back. When merging fails, the layer is what it was.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_quanto import adds_to_data, on_plain_weight
from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix

FIX = Fix(
    id="peft-merge-quanto",
    title="merging a LoRA into weights of quanto has no effect",
    module="peft.tuners.lora.layer",
    claims={"peft": ">=0.13.2,<=0.21.2", "optimum-quanto": ">=0.2.5,<=0.2.7"},
    upstream=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/layer.py",),
    symptom="no LoRA effect after fuse_lora() or merge_and_unload() where quanto has quantized the model",
    harm="wrong result",
    frames=("merge_and_unload", "fuse_lora", "quanto"),
    hot=True,
)


def broken(layer: ModuleType) -> bool:
    """Does a class add to the data of the weight, with nothing of ours around it?"""
    return any(adds_to_data(cls) for cls in _classes(layer))


def patch(layer: ModuleType, draft: Draft) -> None:
    for cls in _classes(layer):
        draft.wrap_plain(cls, "merge", on_plain_weight)
        draft.wrap_plain(cls, "unmerge", on_plain_weight)


def _classes(layer: ModuleType) -> list[type]:
    """Those of linear layers and convolutions: quanto quantizes no others."""
    classes = [
        cls
        for name, cls in vars(layer).items()
        if name in ("Linear", "_ConvNd", "Conv2d") and {"merge", "unmerge"} <= set(vars(cls))
    ]
    if not classes:
        raise TargetMissing(f"{layer.__name__} has no Linear.merge")
    return classes
