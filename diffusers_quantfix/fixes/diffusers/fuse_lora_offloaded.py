"""Fusing a LoRA into an offloaded pipeline has no effect.

Symptom: after ``pipe.fuse_lora()`` under sequential offload the LoRA has no effect at all: it counts as merged, but the
    weights in use do not include it. ``unfuse_lora`` behaves the same way. An 8-bit component raises, or produces wrong
    output.
Cause: peft merges into the current weights. Between uses these are meta tensors, on which every operation succeeds
    without effect.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/lora_base.py; not reported; peft
    has ``onload_layer`` for this, but diffusers does not call it.
Patch: while a pipeline fuses or unfuses, the weights of each offloaded adapter layer are moved to its execution device
    and merged there, and the result is stored in its offloading hooks. Under group offload, which may keep copies, the
    groups are rebuilt from the new weights. When the LoRA is disabled, fused weights are unmerged immediately: peft
    would do it in the next forward pass, again on meta tensors.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...adapters.merging import merges_reach_weights, offloaded_adapter_layer, unmerge_before_disabling
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import merged_adapters as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="diffusers-fuse-lora-offloaded",
    module="diffusers.loaders.lora_base",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "accelerate": "", "peft": ""},
    harm="wrong result",
    patterns=(
        "Expected all tensors to be on the same device",
        r"dequantize_bnb_weight.{0,400}'NoneType' object has no attribute 'to'",
    ),
    frames=(
        r"\bu?n?fuse_lora",
        "lora_base.py:unfuse_lora",
        "lora_base.py:fuse_lora",
        "unmerge|get_delta_weight",
    ),
)


def broken(lora_base: ModuleType) -> bool:
    """Unfuse a pipeline of one offloaded adapter layer; does the layer see its weight's data?"""
    mixin: Any = resolve(lora_base, "LoraBaseMixin")
    resolve(mixin, "fuse_lora")
    resolve(mixin, "unfuse_lora")
    model = offloaded_adapter_layer(lora_base.ModelMixin)

    class Pipeline(mixin):
        _lora_loadable_modules = ("transformer",)
        num_fused_loras = 0
        transformer = model

    Pipeline().unfuse_lora(components=["transformer"])
    return bool(model.layer.met_meta)


def patch(lora_base: ModuleType, draft: Draft) -> None:
    def make(original):
        def fuse_or_unfuse(self, *args, **kwargs):
            with merges_reach_weights(*models_of(self)):
                return original(self, *args, **kwargs)

        return fuse_or_unfuse

    def make_disable(original):
        def disable_lora(self):
            unmerge_before_disabling(*models_of(self))
            return original(self)

        return disable_lora

    def models_of(pipeline):
        return [getattr(pipeline, name, None) for name in pipeline._lora_loadable_modules]

    mixin: Any = resolve(lora_base, "LoraBaseMixin")
    draft.wrap_plain(mixin, "fuse_lora", make)
    draft.wrap_plain(mixin, "unfuse_lora", make)
    draft.wrap_plain(mixin, "disable_lora", make_disable)
