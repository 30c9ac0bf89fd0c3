"""HunyuanDiT cannot run with quantized layers.

Symptom: RuntimeError or AssertionError from torch's ``multi_head_attention_forward``, such as "mat1 and mat2 shapes
    cannot be multiplied" or "self and mat2 must have the same dtype", from every 4-bit or 8-bit HunyuanDiT;
    NotImplementedError "attempting to run unimplemented operator" with torchao.
Cause: ``HunyuanDiTAttentionPool.forward`` calls none of its four layers. It passes their weights, even packed ones, to
    torch's function.
Upstream: not reported. For the same reason it also fails, as do unquantized models, if a layer excluded from
    quantization is offloaded sequentially or at leaf level: the hook that onloads its weight never runs.
Patch: if a weight is quantized, or its layer has such a hook, the same attention is computed by calling the layers.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import LayerCalled, is_plain, packed_stand_in

FIX = Fix(
    __doc__,
    id="diffusers-hunyuan-pooler-weights",
    module="diffusers.models.embeddings",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    since="0.1.0",
    patterns=(
        r"(self|mat1|m1) and (mat2|m2).{0,200}multi_head_attention_forward",
        r"multi_head_attention_forward.{0,2000}(self|mat1|m1) and (mat2|m2)",
        r"expecting query weights shape of",
    ),
    frames=(
        "functional.py:multi_head_attention_forward",
        "HunyuanDiT",
        "diffusers/models/embeddings.py:forward",
    ),
    hot=True,
)

_LAYERS = ("q_proj", "k_proj", "v_proj", "c_proj")


def broken(embeddings: ModuleType) -> bool:
    """Is a layer with a packed weight called?"""
    import torch

    pool = resolve(embeddings, "HunyuanDiTAttentionPool")(1, 4, 1)
    for name in _LAYERS:
        setattr(pool, name, packed_stand_in(4))
    try:
        pool(torch.empty(1, 1, 4))
    except LayerCalled:
        return False
    except (AssertionError, RuntimeError):
        return True
    return False


def patch(embeddings: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(self, x):
            if all(_may_be_read(getattr(self, name)) for name in _LAYERS):
                return original(self, x)
            return _pooled(self, x)

        return forward

    draft.wrap_plain(resolve(embeddings, "HunyuanDiTAttentionPool"), "forward", make)


def _may_be_read(layer: Any) -> bool:
    """Whether the weight is plain, and no hook has to onload it when the layer is called."""
    return is_plain(layer) and not hasattr(layer, "_diffusers_hook") and not hasattr(layer, "_hf_hook")


def _pooled(pool: Any, x: Any) -> Any:
    """The mean of the tokens [batch, tokens, features] attends to itself and to all of them."""
    torch = sys.modules["torch"]

    def heads(projected: Any) -> Any:
        return projected.unflatten(-1, (pool.num_heads, -1)).transpose(1, 2)

    tokens = torch.cat([x.mean(1, keepdim=True), x], 1) + pool.positional_embedding.to(x.dtype)
    # contiguous: the 8-bit kernels read the memory of their input row by row, whatever its strides
    query, key, value = pool.q_proj(tokens[:, :1].contiguous()), pool.k_proj(tokens), pool.v_proj(tokens)
    attended = torch.nn.functional.scaled_dot_product_attention(heads(query), heads(key), heads(value))
    return pool.c_proj(attended.transpose(1, 2).flatten(2)).squeeze(1)
