"""ControlNetUnion and the heads of SigLIP and SigLIP 2 cannot run with quantized layers.

Symptom: RuntimeError from torch's ``multi_head_attention_forward``, such as "self and mat2 must have the same dtype,
    but got BFloat16 and Byte", from every 4-bit or 8-bit ControlNetUnion, SiglipVisionModel or Siglip2VisionModel: the
    image encoder of Flux Redux, FramePack and HunyuanVideo 1.5.
Cause: quantization replaces the ``out_proj`` of ``torch.nn.MultiheadAttention``, which never calls that layer: it
    passes its weight, even a packed one, to torch's function. transformers leaves the layer unquantized since 5.5.4 or
    earlier; models quantized before, or by other means, still fail there.
Upstream: not reported.
Patch: if that weight is quantized, the same attention is computed by calling the layer.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...models.packed_attention import (
    PATTERN,
    calling_output_layer,
    calls_output_layer,
    head_calls_output_layer,
)

# class, its method that calls the attention, its attribute that holds the attention
_ATTENTION = {
    "controlnet_union": ("ResidualAttentionBlock", "attention", "attn"),
    "modeling_siglip": ("SiglipMultiheadAttentionPoolingHead", "forward", "attention"),
    "modeling_siglip2": ("Siglip2MultiheadAttentionPoolingHead", "forward", "attention"),
}

FIX = Fix(
    __doc__,
    id="quantized-attention-output",
    targets=(
        Target(
            "diffusers-controlnet-union-attention",
            "diffusers.models.controlnets.controlnet_union",
            {"diffusers": ">=0.32.0,<=0.42.1"},
        ),
        Target(
            "transformers-siglip-head-attention",
            "transformers.models.siglip.modeling_siglip",
            {"transformers": ">=4.44.2,<=5.24.0"},
        ),
        Target(
            "transformers-siglip2-head-attention",
            "transformers.models.siglip2.modeling_siglip2",
            {"transformers": ">=4.50.0,<=5.24.0"},
        ),
    ),
    patterns=(
        rf"(controlnet_union|modeling_siglip2?\.py).{{0,4000}}multi_head_attention_forward.{{0,2000}}{PATTERN}",
        rf"{PATTERN}.{{0,200}}(ControlNetUnion|Siglip2?[MV])",
    ),
    frames=(
        "functional.py:multi_head_attention_forward",
        "diffusers/models/controlnets/controlnet_union.py:attention",
        "transformers/models/siglip/modeling_siglip.py:forward",
        "transformers/models/siglip2/modeling_siglip2.py:forward",
        "ControlNetUnion|Siglip2?MultiheadAttentionPoolingHead",
    ),
    hot=True,
)


def broken(module: ModuleType) -> bool:
    """Is an output layer with a packed weight called?"""
    name = module.__name__.rpartition(".")[2]
    if name != "controlnet_union":
        return not head_calls_output_layer(
            module, _ATTENTION[name][0].removesuffix("MultiheadAttentionPoolingHead")
        )
    import torch

    block = resolve(module, _ATTENTION[name][0])(4, 1)
    return not calls_output_layer(block.attn, lambda: block.attention(torch.empty(1, 0, 4)))


def patch(module: ModuleType, draft: Draft) -> None:
    cls, method, attention = _ATTENTION[module.__name__.rpartition(".")[2]]
    draft.wrap_plain(resolve(module, cls), method, calling_output_layer(attention))
