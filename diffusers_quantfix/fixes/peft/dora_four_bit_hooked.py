"""A DoRA cannot be added to a 4-bit layer that has hooks.

Symptom: TypeError "cannot pickle 'module' object" or "cannot pickle 'Stream' object" when a DoRA is loaded into a 4-bit
    model under group offloading at leaf level.
Cause: ``DoraLinearLayer.update_layer`` works on a deep copy of the layer. Its hooks are copied too, along with what
    they hold: streams, modules, other layers.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/dora.py; not reported.
Patch: the layer is copied without its hooks.
"""

from __future__ import annotations

import copy
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="peft-dora-4bit-hooked",
    module="peft.tuners.lora.dora",
    claims={"peft": ">=0.13.2,<=0.21.2", "bitsandbytes": ""},
    patterns=(r"cannot pickle '(module|Stream)' object",),
    frames=(r"\bdora\b|use_dora", "peft/"),
    since="0.1.0",
    asked_once=True,
)

# What the hooks of diffusers and accelerate set on a layer.
_HOOKS = ("_diffusers_hook", "_hf_hook", "_old_forward", "forward")


def broken(dora: ModuleType) -> bool:
    """Does it make a deep copy of whatever it is given?"""
    function = resolve(dora, "DoraLinearLayer.update_layer")
    return "deepcopy" in names_used(function)


def patch(dora: ModuleType, draft: Draft) -> None:
    def make(original):
        def update_layer(self, *, base_layer, **kwargs):
            if type(base_layer).__name__ == "Linear4bit" and not vars(base_layer).keys().isdisjoint(_HOOKS):
                base_layer = copy.copy(base_layer)
                for name in _HOOKS:
                    vars(base_layer).pop(name, None)
            return original(self, base_layer=base_layer, **kwargs)

        return update_layer

    draft.wrap_plain(resolve(dora, "DoraLinearLayer"), "update_layer", make)
