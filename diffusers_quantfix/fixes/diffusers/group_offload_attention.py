"""torch's MultiheadAttention cannot run under leaf-level group offloading.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
    (when checking argument for argument self in method wrapper_CUDA_addmm)" from ``multi_head_attention_forward`` after
    ``enable_group_offload(offload_type="leaf_level")``: ControlNetUnion, and image encoders like SigLIP.
Cause: its inner layer ``out_proj`` is a separate group, which is onloaded when that layer is called. It never is:
    torch's function reads its weight.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L840; not
    reported. ``accelerate-attention-offload`` is the same bug under sequential offload.
Patch: that layer's weights join the attention's own group. A quantized layer is left alone: its model's own fix calls
    it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, written_in
from ...models.plain_weights import is_plain
from ...offloading.trial import offloads_on_cpu

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-attention",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    patterns=(r"multi_head_attention_forward.{0,4000}Expected all tensors to be on the same device",),
    frames=("functional.py:multi_head_attention_forward", "diffusers/hooks/hooks.py:new_forward"),
    since="0.1.0",
)

_APPLY = "_apply_group_offloading_leaf_level"


def broken(group_offloading: ModuleType) -> bool:
    """Offload one, on the CPU: is its inner layer onloaded only when it is called?"""
    import torch

    model = torch.nn.Sequential(torch.nn.MultiheadAttention(1, 1))
    if not offloads_on_cpu(group_offloading, model, "leaf_level"):
        return not written_in(resolve(group_offloading, _APPLY), __name__)
    return hasattr(model[0].out_proj, "_diffusers_hook")


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    import torch

    def make(original):
        def _apply_group_offloading_leaf_level(module, *args, **kwargs):
            with contextlib.ExitStack() as shown:
                for attention in list(module.modules()):
                    if isinstance(attention, torch.nn.MultiheadAttention) and is_plain(attention.out_proj):
                        shown.enter_context(_with_weights_of_its_layer(attention))
                return original(module, *args, **kwargs)

        return _apply_group_offloading_leaf_level

    draft.wrap_plain(group_offloading, _APPLY, make)


@contextlib.contextmanager
def _with_weights_of_its_layer(attention: Any) -> Iterator[None]:
    """A block in which ``attention`` has its inner layer's parameters, and no inner layer."""
    held = vars(attention)
    before = {name: held[name] for name in ("_modules", "_parameters")}
    layer = attention._modules["out_proj"]
    held["_modules"] = {name: child for name, child in attention._modules.items() if child is not layer}
    added = {f"out_proj.{name}": parameter for name, parameter in layer._parameters.items()}
    held["_parameters"] = {**attention._parameters, **added}
    try:
        yield
    finally:
        held.update(before)
