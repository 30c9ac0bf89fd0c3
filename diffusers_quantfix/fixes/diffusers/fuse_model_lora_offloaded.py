"""Fusing a LoRA into an offloaded model has no effect.

Symptom: the LoRA has no effect after ``transformer.fuse_lora()`` under ``accelerate.cpu_offload``.
Cause: as for a pipeline (``diffusers-fuse-lora-offloaded``): peft merges into meta tensors.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/loaders/peft.py; not reported.
Patch: the same, for the model's own methods.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.merging import merges_reach_weights, offloaded_adapter_layer, unmerge_before_disabling
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.live import merged_adapters as in_use  # noqa: F401

FIX = Fix(
    __doc__,
    id="diffusers-fuse-model-lora-offloaded",
    module="diffusers.loaders.peft",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "accelerate": "", "peft": ""},
    harm="wrong result",
    frames=("fuse_lora", "loaders/peft.py"),
)


def broken(peft: ModuleType) -> bool:
    """Unfuse a model of one offloaded adapter layer; does the layer see its weight's data?"""
    import torch

    mixin = resolve(peft, "PeftAdapterMixin")
    resolve(mixin, "fuse_lora")
    resolve(mixin, "unfuse_lora")

    model = offloaded_adapter_layer(type("Model", (torch.nn.Module, mixin), {}))
    model.unfuse_lora()
    return bool(model.layer.met_meta)


def patch(peft: ModuleType, draft: Draft) -> None:
    def make(original):
        def fuse_or_unfuse(self, *args, **kwargs):
            with merges_reach_weights(self):
                return original(self, *args, **kwargs)

        return fuse_or_unfuse

    def make_disable(original):
        def disable(self):
            unmerge_before_disabling(self)
            return original(self)

        return disable

    mixin = resolve(peft, "PeftAdapterMixin")
    draft.wrap_plain(mixin, "fuse_lora", make)
    draft.wrap_plain(mixin, "unfuse_lora", make)
    draft.wrap_plain(mixin, "disable_lora", make_disable)
    draft.wrap_plain(mixin, "disable_adapters", make_disable)
