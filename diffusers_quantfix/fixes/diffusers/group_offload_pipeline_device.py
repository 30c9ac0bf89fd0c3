"""A pipeline computes beside its group-offloaded models, on the CPU.

Symptom: after group offload of the models of a pipeline, RuntimeError "Input type (CPUBFloat16Type) and weight type
    (CUDABFloat16Type) should be the same" or "Expected all tensors to be on the same device, but found at least two
    devices, cuda:0 and cpu!": from LEdits++ and LongCat-Image, and from every modular pipeline.
Cause: ``DiffusionPipeline.device`` is the device of the first component. For a text encoder of transformers that is the
    CPU, where its weights are between two passes. ``ModularPipeline._execution_device`` ignores group offload.
Upstream: https://github.com/huggingface/diffusers/pull/14383 and
    https://github.com/huggingface/diffusers/pull/14252, both in 0.40.0.
Patch: where the result would be the CPU, it is the device that a group-offloaded component is onloaded to. Pipelines
    without one have the device that they had.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing, Undecided
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...offloading.hooks import group_onload_device

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-devices",
    targets=(
        Target(
            "diffusers-group-offload-pipeline-device",
            "diffusers.pipelines.pipeline_utils",
            {"diffusers": ">=0.33.0,<0.40.0"},
            fixed_in="diffusers 0.40.0",
        ),
        Target(
            "diffusers-group-offload-modular-device",
            "diffusers.modular_pipelines.modular_pipeline",
            {"diffusers": ">=0.35.0,<0.40.0"},
            fixed_in="diffusers 0.40.0",
        ),
    ),
    patterns=(
        r"Input type \(CPU\w+\) and weight type \(CUDA\w+\) should be the same",
        r"modular_pipelines?.{0,4000}Expected all tensors to be on the same device",
        r"(longcat|ledits).{0,4000}Expected all tensors to be on the same device",
    ),
    frames=(
        "modular_pipeline.py:__call__",
        "pipelines/(longcat_image|ledits_pp)",
        "group_offload|group offload",
        "hooks/hooks.py:new_forward",
    ),
    since="0.1.0",
)

_HOOKS = "diffusers.hooks.group_offloading"

# Module -> class, its property
_PROPERTIES = {
    "pipeline_utils": ("DiffusionPipeline", "device"),
    "modular_pipeline": ("ModularPipeline", "_execution_device"),
}


def broken(module: ModuleType) -> bool:
    """Does a pipeline name the CPU whose components are onloaded to another device?"""
    import torch

    cpu, there = torch.device("cpu"), torch.device("xpu")

    class Component(torch.nn.Module):
        def __init__(self, device: Any) -> None:
            super().__init__()
            self.device = device
            hook = SimpleNamespace(group=SimpleNamespace(onload_device=there))
            hook.config = hook.group
            self._diffusers_hook = SimpleNamespace(get_hook=lambda name: hook)

    cls: Any = resolve(module, _names(module)[0])
    if _names(module)[0] == "ModularPipeline":
        text_encoder = Component(cpu)
        pipe = SimpleNamespace(
            text_encoder=text_encoder, components={"text_encoder": text_encoder}, device=cpu
        )
        device = resolve(cls, "_execution_device").fget(pipe)
    else:
        resolve(module, "ModelMixin.enable_group_offload")  # before 0.33 there is none to cure
        if _HOOKS not in sys.modules:  # without it no component counts as group-offloaded
            raise Undecided(_HOOKS)

        class Pipeline(cls):
            def __init__(self, text_encoder, unet):
                self.text_encoder, self.unet = text_encoder, unet

        device = Pipeline(Component(cpu), Component(there)).device
    return bool(device.type == "cpu")


def patch(module: ModuleType, draft: Draft) -> None:
    import torch

    owner, name = _names(module)

    def make(upstream):
        if not isinstance(upstream, property):
            raise TargetMissing(f"{owner}.{name} is not a property")
        upstream_device: Any = upstream.fget

        def device(self):
            found = upstream_device(self)
            if found.type != "cpu":
                return found
            for component in vars(self).values():
                if (onload_device := group_onload_device(component)) is not None:
                    return torch.device(onload_device)
            return found

        return property(device, doc=upstream.__doc__)

    draft.wrap_plain(resolve(module, owner), name, make)


def _names(module: ModuleType) -> tuple[str, str]:
    return _PROPERTIES[module.__name__.rpartition(".")[2]]
