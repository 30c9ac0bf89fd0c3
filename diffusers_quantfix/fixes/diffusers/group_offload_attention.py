"""Leaf-level group offloading leaves a layer on the CPU whose weight its parent reads.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
    (when checking argument for argument self in method wrapper_CUDA_addmm)" from ``multi_head_attention_forward`` after
    ``enable_group_offload(offload_type="leaf_level")``: ControlNetUnion, and image encoders like SigLIP. "X1 and X2
    must have the same device type" from the codebook of a ``VectorQuantizer``.
Cause: that layer (``out_proj``, the embedding of a codebook or of positions) is a separate group, which is onloaded
    when the layer is called. Its parent reads its weight, and calls it later or never.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L840; not
    reported. ``accelerate-attention-offload`` is the same bug under sequential offload.
Patch: that layer's weights join the parent's own group. A quantized layer is left alone: its model's own fix calls it.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, written_in
from ...finishing import holding
from ...models.plain_weights import is_plain
from ...offloading.containers import READ
from ...offloading.trial import offloads_on_cpu

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-attention",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    patterns=(
        r"multi_head_attention_forward.{0,4000}Expected all tensors to be on the same device",
        "X1 and X2 must have the same device type",
    ),
    frames=(
        "functional.py:multi_head_attention_forward",
        "diffusers/hooks/hooks.py:new_forward",
        "VectorQuantizer",
    ),
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
                for parent in list(module.modules()):
                    for name in layers_read(parent):
                        layer = parent._modules.get(name)
                        if layer is not None and is_plain(layer):
                            shown.enter_context(_with_weights_of_its_layer(parent, name))
                return original(module, *args, **kwargs)

        return _apply_group_offloading_leaf_level

    def layers_read(parent: Any) -> tuple[str, ...]:
        if isinstance(parent, torch.nn.MultiheadAttention):
            return ("out_proj",)
        return READ.get(type(parent).__name__, ())

    draft.wrap_plain(group_offloading, _APPLY, make)


def _with_weights_of_its_layer(parent: Any, name: str) -> AbstractContextManager[None]:
    """A block in which ``parent`` has the parameters of its layer of that name, and not the layer."""
    layer = parent._modules[name]
    others = {key: child for key, child in parent._modules.items() if child is not layer}
    added = {f"{name}.{key}": parameter for key, parameter in layer._parameters.items()}
    return holding(parent, _modules=others, _parameters={**parent._parameters, **added})
