"""Training under sequential offload silently changes nothing.

Symptom: training under ``enable_sequential_cpu_offload()``, ``accelerate.cpu_offload`` or ``disk_offload`` runs without
    an error, but no weight changes: every gradient is None.
Cause: ``AlignDevicesHook`` makes a new parameter for each weight in each forward pass, and another one on meta after
    it. The gradient goes to the first, which nothing refers to any more.
Upstream: https://github.com/huggingface/accelerate/issues/3770 and
    https://github.com/huggingface/accelerate/issues/3785, closed as a limitation of the method.
Patch: such a model in training mode raises an error when the backward pass begins. It is only a warning if this may be
    intended: an input requires a gradient, other trainable parameters are not offloaded, or the model itself is in eval
    mode.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve
from ...offloading.hooks import align_hooks
from ...offloading.nested_tensors import nested_tensors
from ...offloading.uncompiled import uncompiled_later

FIX = Fix(
    __doc__,
    id="accelerate-offloaded-training",
    module="accelerate.hooks",
    claims={"accelerate": "<=1.15.0"},
    harm="wrong result",
    since="0.1.0",
    hot=True,
    asked_once=True,
)

LOST = (
    "trainable weights of this model are offloaded weight by weight (`enable_sequential_cpu_offload()`, "
    "`accelerate.cpu_offload` or a device_map with the CPU or the disk), where no gradient reaches them and no "
    "optimizer changes them: "
)
REFUSED = LOST + (
    "train it on its device or under `enable_model_cpu_offload()`; if something else is trained, call `eval()` on it"
)
WARNED = LOST + "to train them, do not offload them"


def broken(hooks: ModuleType) -> bool:
    """Does the hook put weights on meta after each pass, and let the backward pass begin?"""
    post_forward = resolve(hooks, "AlignDevicesHook.post_forward")
    return "set_module_tensor_to_device" in names_used(post_forward)


def patch(hooks: ModuleType, draft: Draft) -> None:
    torch = sys.modules["torch"]

    # Only a whole model's hook moves its output back to the input's device.
    def make_pre(original):
        @uncompiled_later
        def note(self, args, kwargs):
            self._asked_for_gradients = any(one.requires_grad for one in nested_tensors([args, kwargs]))

        def pre_forward(self, module, *args, **kwargs):
            if self.io_same_device and torch.is_grad_enabled():
                note(self, args, kwargs)
            return original(self, module, *args, **kwargs)

        return pre_forward

    def make_post(original):
        def post_forward(self, module, output):
            output = original(self, module, output)
            if self.io_same_device and torch.is_grad_enabled():
                watch(module, output, getattr(self, "_asked_for_gradients", False))
            return output

        return post_forward

    @uncompiled_later
    def watch(model, output, asked):
        tensors = [tensor for tensor in nested_tensors(output) if tensor.grad_fn is not None]
        if not tensors:
            return
        lost = [_offloaded(module) for module in model.modules() if _trains(module)]
        if any(lost):
            for tensor in tensors:
                tensor.register_hook(refuse if model.training and all(lost) and not asked else warn)

    def refuse(gradient):
        raise ValueError(REFUSED)

    def warn(gradient):
        warnings.warn(WARNED, stacklevel=2)

    hook = resolve(hooks, "AlignDevicesHook")
    draft.wrap_plain(hook, "pre_forward", make_pre)
    draft.wrap_plain(hook, "post_forward", make_post)


def _trains(module: Any) -> bool:
    return module.training and any(
        parameter is not None and parameter.requires_grad for parameter in module._parameters.values()
    )


def _offloaded(module: Any) -> bool:
    return any(hook.offload for hook in align_hooks(module))
