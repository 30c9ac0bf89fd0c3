"""Layerwise casting fails with a LoRA in another dtype.

Symptom: RuntimeError "expected m1 and m2 to have the same dtype, but got: c10::Half != float" in a run of an 8-bit
    float16 model with a LoRA, after ``enable_layerwise_casting``. An 8-bit layer's LoRA stays in float32 if its file is
    in float32.
Cause: ``_disable_peft_input_autocast`` keeps peft from casting a layer's input to its adapter's dtype, which would be
    the storage dtype, float8. It also does so if only the base layer's bias is cast layerwise, although
    ``enable_layerwise_casting`` skips the adapter, which then needs the input cast.
Upstream: not reported. An unquantized model fails in the same way; there the LoRA is loaded in the model's dtype.
Patch: peft casts the input of a layer whose adapter is not subject to layerwise casting.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="diffusers-layerwise-casting-lora",
    module="diffusers.hooks.layerwise_casting",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "peft": ""},
    since="0.1.0",
    patterns=(
        r"peft/tuners/lora/.{0,2000}(expected m1 and m2|mat1 and mat2 must) .{0,10}have the same dtype",
    ),
    frames=("layerwise_casting", "peft/tuners/lora/"),
    asked_once=True,
)

_DISABLE = "_disable_peft_input_autocast"


def broken(layerwise_casting: ModuleType) -> bool:
    """Does it check peft's layers without checking their adapters?"""
    disable = resolve(layerwise_casting, _DISABLE)
    names = names_used(disable)
    return "BaseTunerLayer" in names and "adapter_layer_names" not in names


def patch(layerwise_casting: ModuleType, draft: Draft) -> None:
    hook_name = resolve(layerwise_casting, "_PEFT_AUTOCAST_DISABLE_HOOK")
    is_cast = resolve(layerwise_casting, "_is_layerwise_casting_active")

    def make(original):
        def _disable_peft_input_autocast(module):
            original(module)
            for layer in module.modules():
                registry = getattr(layer, "_diffusers_hook", None)
                if registry is None or registry.get_hook(hook_name) is None:
                    continue
                adapters = (getattr(layer, name, None) for name in layer.adapter_layer_names)
                if not any(is_cast(one) for one in adapters if one is not None):
                    registry.remove_hook(hook_name, recurse=False)

        return _disable_peft_input_autocast

    draft.wrap_plain(layerwise_casting, _DISABLE, make)
