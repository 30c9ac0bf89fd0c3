"""ControlNetUnion cannot run with quantized layers.

Symptom: RuntimeError from torch's ``multi_head_attention_forward``, such as "self and mat2 must have the same dtype,
    but got BFloat16 and Byte", from every ControlNetUnion in 4 or 8 bits.
Cause: quantization replaces the ``out_proj`` of ``torch.nn.MultiheadAttention``, which never calls that layer: it gives
    its weight, a packed one too, to torch's function.
Upstream: not reported.
Patch: where that weight is quantized, the same attention is computed by calling the layer.
"""

from __future__ import annotations

import sys

from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import LayerCalled, is_plain, packed_stand_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

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
        r"controlnet_union.{0,4000}multi_head_attention_forward.{0,2000}(self|mat1|m1) and (mat2|m2)",
        r"(self|mat1|m1) and (mat2|m2).{0,200}ControlNetUnion",
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
        block.attn.out_proj = packed_stand_in(4)
        try:
            block.attention(torch.empty(1, 1, 4))
        except LayerCalled:
            return False
        except (AssertionError, RuntimeError):
            return True
    return False


def patch(controlnet_union: ModuleType, draft: Draft) -> None:
    def make(original):
        def attention(self, x):
            return original(self, x) if is_plain(self.attn.out_proj) else _attended(self, x)

        return attention

    draft.wrap_plain(resolve(controlnet_union, "ResidualAttentionBlock"), "attention", make)


def _attended(block: Any, x: Any) -> Any:
    """The tokens [tokens, batch, features] attend to each other."""
    torch = sys.modules["torch"]
    attn, mask = block.attn, block.attn_mask
    projected = torch.nn.functional.linear(x, attn.in_proj_weight, attn.in_proj_bias)
    query, key, value = projected.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 1, 3, 0, 4)
    if mask is not None:
        mask = mask.to(x)
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attn.out_proj(attended.permute(2, 0, 1, 3).flatten(2))
