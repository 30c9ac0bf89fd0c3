"""Attention under XPU's name: torch takes for granted that a kernel chooses between its ways, and a CPU build has none.

The math of torch's own Python-visible fallback runs instead, as it does for the devices under CUDA's name.
"""

from __future__ import annotations

import torch

from .accelerator import KEY, KIND
from .undo import Undo


def install(undo: Undo) -> None:
    """Give torch's attention a kernel for the devices."""
    if KIND != "xpu":
        return
    theirs = torch.library.Library("aten", "IMPL")
    undo.call(theirs._destroy)
    for key in (KEY, f"Autograd{KEY}"):
        theirs.impl("scaled_dot_product_attention", _attention, key)


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    output, _ = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return output
