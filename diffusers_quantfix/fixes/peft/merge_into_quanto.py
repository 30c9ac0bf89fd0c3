"""Merging a LoRA, LoKr or LoHa into quanto weights has no effect.

Symptom: after ``fuse_lora()``, ``merge_adapter()`` or ``merge_and_unload()`` of a model with quanto weights the output
    is the same as without the adapter.
Cause: ``merge`` adds the adapter's product to ``base_layer.weight.data``. For a quanto tensor the sum is a new,
    dequantized tensor, and assigning it to ``.data`` changes nothing that the layer uses; the adapter counts as merged.
    This applies to the layers of LoRA, and to those shared by LoKr, LoHa and others.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/layer.py,
    https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lycoris_utils.py; not reported; peft has its own
    layers for other quantization methods, but none for quanto.
Patch: while peft merges, the layer has a plain weight; then it is quantized again, the way quanto does it. The previous
    packed weight is kept in host memory until the adapter is unmerged or unloaded, so that unmerging restores exactly
    the same bits. If merging fails, the layer is restored.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging_quanto import adds_to_data, on_plain_weight
from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix, Target
from ...offloading.live import merged_adapters as in_use  # noqa: F401

# For LoRA, those of linear layers and convolutions: quanto quantizes no others.
_CLASSES = ("Linear", "_ConvNd", "Conv2d", "LycorisLayer")

FIX = Fix(
    __doc__,
    id="peft-merge-into-quanto",
    targets=(
        Target(
            "peft-merge-lycoris-quanto",
            "peft.tuners.lycoris_utils",
            {"peft": ">=0.13.2,<=0.21.2", "optimum-quanto": ">=0.2.5,<=0.2.7"},
        ),
        Target(
            "peft-merge-quanto",
            "peft.tuners.lora.layer",
            {"peft": ">=0.13.2,<=0.21.2", "optimum-quanto": ">=0.2.5,<=0.2.7"},
        ),
    ),
    harm="wrong result",
    frames=("merge_and_unload|fuse_lora", r"\blora\b|lokr|loha|lycoris", "quanto"),
    hot=True,
    asked_once=True,
)


def broken(module: ModuleType) -> bool:
    """Does a class add to the weight's data?"""
    return any(adds_to_data(cls) for cls in _classes(module))


def patch(module: ModuleType, draft: Draft) -> None:
    for cls in _classes(module):
        draft.wrap_plain(cls, "merge", on_plain_weight)
        draft.wrap_plain(cls, "unmerge", on_plain_weight)


def _classes(module: ModuleType) -> list[type]:
    found = [
        cls
        for name, cls in vars(module).items()
        if name in _CLASSES and cls.__module__ == module.__name__ and {"merge", "unmerge"} <= set(vars(cls))
    ]
    if not found:
        raise TargetMissing(f"{module.__name__} has no layer with its own merge")
    return found
