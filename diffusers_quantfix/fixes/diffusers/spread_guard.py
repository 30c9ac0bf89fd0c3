"""pipe.to("cuda") accepts bitsandbytes components that are spread over several devices.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and
    cuda:1!" from every call of a pipeline after ``pipe.to("cuda:0")``, when a 4-bit or 8-bit component was loaded with
    a ``device_map`` over several devices. Without quantization the same ``to`` raises a ValueError.
Cause: the guard in ``DiffusionPipeline.to`` is not used when any component was quantized by bitsandbytes. The weights
    move, but the component's hooks still send each layer's inputs to where its weights were.
Upstream: not reported; the condition came with https://github.com/huggingface/diffusers/pull/9840 (0.32.0).
Patch: such a pipeline is refused before anything moves, with a ValueError that names the component.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.guarded import gets_past_the_guard, guarded_device, mark_as_4bit
from ...offloading.hooks import is_spread

FIX = Fix(
    __doc__,
    id="diffusers-spread-guard",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.32.0,<=0.42.1", "accelerate": ">=1.1.0", "bitsandbytes": ""},
    patterns=(r"\A(?=.*device_map).*Expected all tensors to be on the same device",),
    frames=("device_map", r"pipe\.to\("),
)


def broken(pipeline_utils: ModuleType) -> bool:
    """Move a pipeline with one component, 4-bit and on two devices, to a GPU, as far as the guard."""
    component = _spread_4bit_model()
    if component is None:
        return False

    try:
        return gets_past_the_guard(resolve(pipeline_utils, "DiffusionPipeline"), component)
    except ValueError:
        return False


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def to(self, *args, **kwargs):
            device = guarded_device(self, args, kwargs)
            if device is not None:
                for name, component in self.components.items():
                    refuse(name, component, device)
            return original(self, *args, **kwargs)

        return to

    def refuse(name, component, device):
        if not is_spread(component):
            return
        if not hasattr(component, "_hf_hook") or not any(pipeline_utils._check_bnb_status(component)):
            return
        listed = ", ".join(sorted(set(map(str, component.hf_device_map.values()))))
        raise ValueError(
            f"{name} ({type(component).__name__}) is spread over several devices by its device_map ({listed}), so the"
            f" pipeline cannot be moved to {device}. Load {name} onto one device, for example with"
            f' device_map={{"": "{device}"}}, or move the other components one by one and leave {name} where it is.'
        )

    draft.wrap_plain(resolve(pipeline_utils, "DiffusionPipeline"), "to", make)


def _spread_4bit_model() -> Any:
    """A module without weights whose hook only moves inputs, as accelerate's do if nothing is offloaded."""
    hooks: Any = sys.modules.get("accelerate.hooks")
    if not hasattr(hooks, "AlignDevicesHook"):
        return None
    import torch

    component = torch.nn.Module()
    component._hf_hook = hooks.AlignDevicesHook(io_same_device=True)
    component.hf_device_map = {"one": 0, "two": 1}
    return mark_as_4bit(component)
