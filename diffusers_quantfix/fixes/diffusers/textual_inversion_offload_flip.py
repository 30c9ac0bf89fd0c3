"""Loading a textual inversion switches the whole pipeline to sequential CPU offload.

Symptom: every run is slow after ``load_textual_inversion()``: the whole pipeline is under
    ``enable_sequential_cpu_offload``, which was never requested. Or it is not offloaded at all, although some
    components were.
Cause: the same as for a LoRA (``diffusers-lora-offload-flip``), in a second copy of the code: every root hook of class
    ``AlignDevicesHook`` counts as sequential offload, the last component with a hook decides, and the whole pipeline is
    offloaded again. ``unload_textual_inversion`` does not look at hooks at all, and copies embeddings that are on meta.
Upstream: https://github.com/huggingface/diffusers/issues/7539, https://github.com/huggingface/diffusers/pull/8750;
    open.
Patch: during loading, the offloading hooks of the text encoders are removed; then the same hooks are restored.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.token_embeddings import text_encoders
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...offloading.suspended import hidden_hooks, hooks_aside

FIX = Fix(
    __doc__,
    id="diffusers-textual-inversion-offload-flip",
    module="diffusers.loaders.textual_inversion",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "accelerate": ""},
    harm="memory or time",
    patterns=("enable_sequential_cpu_offload requires accelerator, but not found",),
    frames=("load_textual_inversion", "textual_inversion.py"),
    asked_once=True,
)

_METHODS = ("load_textual_inversion", "unload_textual_inversion")


def broken(textual_inversion: ModuleType) -> bool:
    """Does it check the class of the hooks?"""
    load = resolve(textual_inversion, "TextualInversionLoaderMixin.load_textual_inversion")
    return "AlignDevicesHook" in names_used(load)


def patch(textual_inversion: ModuleType, draft: Draft) -> None:
    def make(original):
        def load_or_unload(self, *args, **kwargs):
            components = getattr(self, "components", None)
            if not isinstance(components, dict):
                return original(self, *args, **kwargs)
            encoders = text_encoders(self, (*args, *kwargs.values()))
            with hooks_aside(*encoders), hidden_hooks([*components.values(), *encoders]):
                return original(self, *args, **kwargs)

        return load_or_unload

    mixin = resolve(textual_inversion, "TextualInversionLoaderMixin")
    for name in _METHODS:
        draft.wrap_plain(mixin, name, make)
