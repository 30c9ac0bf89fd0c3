"""``disable_cache`` of an offloaded model removes its offloading.

Symptom: RuntimeError "Expected all tensors to be on the same device" in the first run after ``disable_cache()``, if
    FasterCache was enabled before ``enable_model_cpu_offload()`` or ``enable_sequential_cpu_offload()``.
Cause: ``HookRegistry.remove_hook`` restores the module's forward from before the hook. accelerate's forward, which
    onloads the weights, was wrapped around the hook later and is lost with it.
Upstream: not reported.
Patch: accelerate's forward stays, wrapped around the one the module had before.
"""

from __future__ import annotations

import functools
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-cache-disabled-offloaded",
    module="diffusers.hooks.hooks",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "accelerate": ""},
    patterns=("Expected all tensors to be on the same device",),
    frames=("disable_cache",),
    since="0.1.0",
)


def broken(hooks: ModuleType) -> bool:
    """Wrap a forward around a hook as accelerate does, and remove the hook: is that forward still there?"""
    import torch

    module = torch.nn.Identity()
    registry = resolve(hooks, "HookRegistry").check_if_exists_or_initialize(module)
    registry.register_hook(hooks.ModelHook(), "probe")
    module._hf_hook, module._old_forward = None, module.forward

    def offloading(*args):
        return module._old_forward(*args)

    module.forward = offloading
    registry.remove_hook("probe")
    return module.forward is not offloading


def patch(hooks: ModuleType, draft: Draft) -> None:
    def make(original):
        def remove_hook(self, name, recurse=True):
            module = self._module_ref
            around, inside = module.forward, vars(module).get("_old_forward")
            original(self, name, recurse)
            if hasattr(module, "_hf_hook") and module.forward is not around and is_of_registry(inside):
                module._old_forward = module.forward
                module.forward = around

        return remove_hook

    def is_of_registry(forward):
        return isinstance(forward, functools.partial) and forward.func.__globals__ is vars(hooks)

    draft.wrap_plain(resolve(hooks, "HookRegistry"), "remove_hook", make)
