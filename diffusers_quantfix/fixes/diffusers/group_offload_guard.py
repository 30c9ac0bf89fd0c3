"""Group offloading refuses 8-bit models that were only loaded.

Symptom: ValueError "Cannot apply group offloading to a module that is already applying an alternative offloading
    strategy from Accelerate" for a model that was only loaded.
Cause: ``_raise_error_if_accelerate_model_or_sequential_hook_present`` refuses every ``AlignDevicesHook``.
    ``accelerate.dispatch_model`` puts one with ``offload=False``, which only moves the inputs to the model's device, on
    every 8-bit model (accelerate before 1.13, or bitsandbytes before 0.48), and on other models when requested.
Upstream: no issue; https://github.com/huggingface/diffusers/issues/11352 is the same bug elsewhere.
Patch: a bitsandbytes model whose hooks only move inputs, all to one device, does not count as offloaded. The hooks
    stay, and from then on move the inputs to the groups' onload device.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.hooks import accelerate_hooks
from ...weights.method import method_of

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-guard",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1", "accelerate": "", "bitsandbytes": ">=0.43.0"},
    patterns=(
        "Cannot apply group offloading to a module that is already applying an alternative offloading strategy",
    ),
    frames=("group_offloading.py",),
)

_GUARD = "_raise_error_if_accelerate_model_or_sequential_hook_present"


def broken(group_offloading: ModuleType) -> bool:
    """Call the guard with a quantized model that has a hook that only aligns inputs."""
    guard = resolve(group_offloading, _GUARD)
    from accelerate.hooks import AlignDevicesHook

    model = SimpleNamespace(
        _hf_hook=AlignDevicesHook(execution_device="cpu", io_same_device=True),
        is_loaded_in_8bit=True,
        quantization_method="bitsandbytes",
    )
    model.modules = lambda: [model]
    model.named_modules = lambda: [("", model)]
    try:
        guard(model)
    except ValueError:
        return True
    return False


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    import inspect

    import torch
    from accelerate.hooks import AlignDevicesHook

    def aligning(model):
        """The hooks of a quantized model, if all of them only move inputs to one device; otherwise none."""
        if method_of(model) != "bitsandbytes":
            return []
        hooks = [hook for module in model.modules() for hook in accelerate_hooks(module)]
        if not all(isinstance(hook, AlignDevicesHook) and not hook.offload for hook in hooks):
            return []
        return hooks if len({str(hook.execution_device) for hook in hooks}) == 1 else []

    def make_guard(original):
        def guard(module):
            if not aligning(module):
                original(module)

        return guard

    def make_apply(original):
        signature = inspect.signature(original)

        def apply_group_offloading(*args, **kwargs):
            result = original(*args, **kwargs)
            asked = signature.bind(*args, **kwargs).arguments
            for hook in aligning(asked["module"]):
                hook.execution_device = torch.device(asked["onload_device"])
            return result

        return apply_group_offloading

    draft.wrap_plain(group_offloading, _GUARD, make_guard)
    draft.wrap_plain(group_offloading, "apply_group_offloading", make_apply)
