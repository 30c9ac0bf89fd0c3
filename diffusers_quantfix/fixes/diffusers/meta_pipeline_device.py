"""The device of a sequentially offloaded pipeline is meta.

Symptom: "NotImplementedError: Cannot copy out of meta tensor; no data!" from a pipeline that sends its inputs to
    ``self.device`` instead of ``self._execution_device`` (LongCat-Image, SEGA, LEdits++), and from user code that sends
    its own tensors to ``pipe.device``.
Cause: ``DiffusionPipeline.device`` is the device of one component, and under ``enable_sequential_cpu_offload`` the
    weights of every component are meta tensors between forward passes.
Upstream: https://github.com/huggingface/diffusers/issues/10958. Since 0.40 the property prefers a component that is
    neither on the CPU nor on meta, so that a pipeline with components on several devices returns the accelerator it
    computes on.
Patch: components whose weights an offloading hook holds are ignored, since they accept inputs from any device;
    upstream's own rule is applied to the others. If all are held by hooks, the result is the execution device of the
    first.

This is more than ``diffusers-meta-component-device`` and its twin, which patch the components: with those alone, an
offloaded text encoder that runs on cuda:1 could take precedence over the transformer on cuda:0, while today meta does
not count. We read every condition on the device of a pipeline in 12 releases from 0.31.0 to 0.42.1: none needs meta.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-meta-pipeline-device",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": "<=0.42.1", "accelerate": ""},
    patterns=(
        "Cannot copy out of meta tensor; no data",
        r"Tensor\.item\(\) cannot be called on meta tensors",
    ),
    frames=(
        "accelerate/utils/operations.py:send_to_device",
        r"(pipe|pipeline|self)\.device\b",
        "diffusers/models/embeddings.py",
    ),
)


def broken(pipeline_utils: ModuleType) -> bool:
    """Does a pipeline whose only component is held by an offloading hook, and reports meta, report meta too?"""
    import torch

    from ...offloading.hooks import offloaded_stand_in

    class Component(torch.nn.Module):  # not a ModelMixin, whose device may already be patched
        device = torch.device("meta")

    base: Any = resolve(pipeline_utils, "DiffusionPipeline")

    class Pipeline(base):
        def __init__(self, component):
            self.component = component

    component = offloaded_stand_in(Component)
    return component is not None and Pipeline(component).device.type == "meta"


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    import torch

    from ...offloading.hooks import is_held_on_meta, offload_execution_device

    def make(upstream):
        if not isinstance(upstream, property):
            raise TargetMissing("DiffusionPipeline.device is not a property")
        chosen_device: Any = upstream.fget

        def device(self):
            parts = {name: getattr(self, name, None) for name in sorted(self._get_signature_keys(self)[0])}
            modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
            held = [name for name, module in modules.items() if is_held_on_meta(module)]
            if not held:
                return chosen_device(self)
            if len(held) == len(modules):
                return offload_execution_device(modules[held[0]])
            # The same pipeline without them; its constructor must not run again.
            others = object.__new__(type(self))
            others.__dict__.update(vars(self), **dict.fromkeys(held))
            return chosen_device(others)

        return property(device, doc=upstream.__doc__)

    draft.wrap_plain(resolve(pipeline_utils, "DiffusionPipeline"), "device", make)
