"""ControlNetUnion cannot run with quantized layers.

Symptom: RuntimeError from torch's ``multi_head_attention_forward``, such as "self and mat2 must have the same dtype,
    but got BFloat16 and Byte", from every ControlNetUnion in 4 or 8 bits.
Cause: quantization replaces the ``out_proj`` of ``torch.nn.MultiheadAttention``, which never calls that layer: it gives
    its weight, a packed one too, to torch's function.
Upstream: not reported.
Patch: where that weight is quantized, the same attention is computed by calling the layer.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.packed_attention import PATTERN, calling_output_layer, calls_output_layer

FIX = Fix(
    id="diffusers-controlnet-union-attention",
    title="ControlNetUnion cannot run with quantized layers",
    module="diffusers.models.controlnets.controlnet_union",
    claims={"diffusers": ">=0.32.0,<=0.42.1"},
    upstream=(),
    symptom="RuntimeError: self and mat2 must have the same dtype, or mat1 and mat2 shapes cannot be multiplied, from "
    "multi_head_attention_forward in ControlNetUnionModel",
    since="0.1.0",
    patterns=(
        rf"controlnet_union.{{0,4000}}multi_head_attention_forward.{{0,2000}}{PATTERN}",
        rf"{PATTERN}.{{0,200}}ControlNetUnion",
    ),
    frames=(
        "diffusers/models/controlnets/controlnet_union.py:attention",
        "ControlNetUnion",
    ),
    hot=True,
)


def broken(controlnet_union: ModuleType) -> bool:
    """Is an output layer with a packed weight called?"""
    import torch

    with torch.device("meta"):
        block = resolve(controlnet_union, "ResidualAttentionBlock")(4, 1)
        return not calls_output_layer(block.attn, lambda: block.attention(torch.empty(1, 1, 4)))


def patch(controlnet_union: ModuleType, draft: Draft) -> None:
    block = resolve(controlnet_union, "ResidualAttentionBlock")
    draft.wrap_plain(block, "attention", calling_output_layer("attn"))
