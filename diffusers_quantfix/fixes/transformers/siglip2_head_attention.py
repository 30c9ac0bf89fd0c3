"""The head of SigLIP 2 cannot run with quantized layers.

Symptom: RuntimeError "self and mat2 must have the same dtype, but got BFloat16 and Byte" from torch's
    ``multi_head_attention_forward``, from Siglip2VisionModel, in 4 or 8 bits.
Cause: bitsandbytes' layer is put in the place of ``out_proj`` of ``torch.nn.MultiheadAttention``, which never calls
    that layer: it gives its weight, a packed one too, to torch's function. transformers leaves it as it is since
    5.5.4 or earlier; models that were quantized before, or by other means, fail there, too.
Upstream: not reported.
Patch: where that weight is quantized, the same attention is computed by calling the layer. Twin:
    ``transformers-siglip-head-attention``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.packed_attention import PATTERN, calling_output_layer, head_calls_output_layer

FIX = Fix(
    id="transformers-siglip2-head-attention",
    title="the head of SigLIP 2 cannot run with quantized layers",
    module="transformers.models.siglip2.modeling_siglip2",
    claims={"transformers": ">=4.50.0,<=5.23.0"},
    upstream=(),
    symptom="RuntimeError: self and mat2 must have the same dtype, from multi_head_attention_forward in "
    "Siglip2MultiheadAttentionPoolingHead",
    since="0.1.0",
    patterns=(
        rf"modeling_siglip2\.py.{{0,4000}}multi_head_attention_forward.{{0,2000}}{PATTERN}",
        rf"{PATTERN}.{{0,200}}Siglip2[MV]",
    ),
    frames=(
        "functional.py:multi_head_attention_forward",
        "transformers/models/siglip2/modeling_siglip2.py:forward",
        "Siglip2MultiheadAttentionPoolingHead",
    ),
    hot=True,
)


def broken(modeling_siglip2: ModuleType) -> bool:
    """Is an output layer with a packed weight called?"""
    return not head_calls_output_layer(modeling_siglip2, "Siglip2")


def patch(modeling_siglip2: ModuleType, draft: Draft) -> None:
    head = resolve(modeling_siglip2, "Siglip2MultiheadAttentionPoolingHead")
    draft.wrap_plain(head, "forward", calling_output_layer("attention"))
