"""Model offload leaves inputs, and layers, on the CPU if a model's first parameter is on the device.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    under ``enable_model_cpu_offload()``: from the second pass of a text encoder whose inputs are on the CPU, as in
    ``generate`` of LongCat-Image, and from the transformer of a Z-Image ControlNet pipeline.
Cause: since 1.10 ``CpuOffload.pre_forward`` returns at once if the first parameter is on the device. Inputs are not
    moved then. Nor is the rest of a model that shares its first layers: ``ZImageControlNetModel.from_transformer``
    shares layers of the transformer with the ControlNet, its first ones among them, and the ControlNet runs first.
Upstream: https://github.com/huggingface/accelerate/pull/3695, in 1.10.0, is the cause; not reported.
Patch: the first parameter of each block is checked; if one is on the CPU, the model is onloaded. Inputs that are on
    another device are moved, as before 1.10.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...offloading.nested_tensors import nested_tensors
from ...offloading.uncompiled import uncompiled_later

FIX = Fix(
    __doc__,
    id="accelerate-partly-offloaded",
    module="accelerate.hooks",
    claims={"accelerate": ">=1.10.0,<=1.15.0"},
    patterns=(r"(transformer_z_image|rewire_prompt).{0,4000}Expected all tensors to be on the same device",),
    frames=(
        "z_image|ZImage",
        "controlnet",
        "enable_model_cpu_offload",
        "accelerate/hooks.py:new_forward",
        "rewire_prompt",
    ),
    since="0.1.0",
    hot=True,
    asked_once=True,
)


def broken(hooks: ModuleType) -> bool:
    """Run a model whose first layer is on its device, meta, and whose second and inputs are not: are they moved?"""
    import torch

    cls = resolve(hooks, "CpuOffload")
    method = resolve(cls, "pre_forward")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, device="meta"), torch.nn.Linear(1, 1))
    moves: list[Any] = []
    vars(model)["to"] = moves.append
    # Without its decorator, which imports torch's compiler.
    (given,), _ = function_of(method)(cls(execution_device=torch.device("meta")), model, torch.zeros(1))
    return not moves or not given.is_meta


def patch(hooks: ModuleType, draft: Draft) -> None:
    def make(original):
        # torch.compile traces hooks, of accelerate 1.12 and older at least.
        @uncompiled_later
        def onload(self, module, args, kwargs):
            device = self.execution_device
            looked_at = next(module.parameters()).device
            given = original(self, module, *args, **kwargs)
            if looked_at == device and any(parameter.is_cpu for parameter in _first_parameters(module)):
                module.to(device)
            if looked_at == device and any(tensor.device != device for tensor in nested_tensors(given)):
                given = hooks.send_to_device(given, device)
            return given

        def pre_forward(self, module, *args, **kwargs):
            return onload(self, module, args, kwargs)

        return pre_forward

    draft.wrap_plain(resolve(hooks, "CpuOffload"), "pre_forward", make)


def _first_parameters(module: Any) -> Iterator[Any]:
    """The parameters of ``module`` itself, and the first one of each child, or of each item if the child is a list."""
    nn = sys.modules["torch"].nn
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module._modules.values():
        items = child if isinstance(child, (nn.ModuleList, nn.Sequential)) else (child,)
        for item in items:
            parameter = None if item is None else next(item.parameters(), None)
            if parameter is not None:
                yield parameter
