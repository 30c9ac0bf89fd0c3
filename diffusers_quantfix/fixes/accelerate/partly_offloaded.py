"""Model offload does not onload a model that shares layers with one already onloaded.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    from the transformer of a Z-Image ControlNet pipeline under ``enable_model_cpu_offload()``.
Cause: ``CpuOffload.pre_forward`` checks only the first parameter. ``ZImageControlNetModel.from_transformer`` shares
    layers of the transformer with the ControlNet, its first ones among them, and the ControlNet runs first.
Upstream: https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/hooks.py#L759; not reported.
Patch: the first parameter of each block is checked; if one is on the CPU, the model is onloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve
from ...offloading.uncompiled import uncompiled_later

FIX = Fix(
    __doc__,
    id="accelerate-partly-offloaded",
    module="accelerate.hooks",
    claims={"accelerate": ">=1.10.0,<=1.15.0"},
    patterns=(r"transformer_z_image.{0,4000}Expected all tensors to be on the same device",),
    frames=("z_image|ZImage", "controlnet", "enable_model_cpu_offload", "accelerate/hooks.py:new_forward"),
    since="0.1.0",
    hot=True,
    asked_once=True,
)


def broken(hooks: ModuleType) -> bool:
    """Run a model whose first layer is on its device, meta, and whose second is not: is it onloaded?"""
    import torch

    cls = resolve(hooks, "CpuOffload")
    method = resolve(cls, "pre_forward")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, device="meta"), torch.nn.Linear(1, 1))
    moves: list[Any] = []
    vars(model)["to"] = moves.append
    # Without its decorator, which imports torch's compiler.
    function_of(method)(cls(execution_device=torch.device("meta")), model)
    return not moves


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
