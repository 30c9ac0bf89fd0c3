"""A quantized Latte computes in float32, and its pipeline fails in the second step.

Symptom: RuntimeError "Input type (float) and bias type (c10::BFloat16) should be the same" from ``LattePipeline``,
    whose transformer is quantized and was loaded in bfloat16; its output is in float32.
Cause: a quantized model is not cast after loading, so ``temp_pos_embed``, a buffer that no checkpoint holds, stays in
    float32. ``forward`` adds it to the hidden states.
Upstream: https://github.com/huggingface/diffusers/pull/11139, in 0.33.0, casts it.
Patch: ``forward`` reads it in the dtype of its input.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import InPlaceOf

FIX = Fix(
    __doc__,
    id="diffusers-latte-position-dtype",
    module="diffusers.models.transformers.latte_transformer_3d",
    claims={"diffusers": ">=0.31.0,<0.33.0"},
    patterns=(r"latte.{1,4000}Input type \(float\) and bias type \(c10::\w+\) should be the same",),
    frames=("latte_transformer_3d.py", "pipeline_latte.py", "Latte"),
    fixed_in="diffusers 0.33.0",
    since="0.1.0",
    hot=True,
)

_TABLE = "temp_pos_embed"


def broken(latte_transformer_3d: ModuleType) -> bool:
    """Run a small model in bfloat16 with that buffer in float32: do its layers, or its caller, get float32?"""
    import torch

    cls = resolve(latte_transformer_3d, "LatteTransformer3DModel")
    model = cls(
        num_attention_heads=1, attention_head_dim=4, in_channels=1, out_channels=1, num_layers=1, sample_size=2,
        patch_size=2, caption_channels=4, video_length=2, norm_type="ada_norm_single", norm_elementwise_affine=False,
    ).to("meta", torch.bfloat16)  # fmt: skip
    setattr(model, _TABLE, getattr(model, _TABLE).float())
    inputs = torch.empty(1, 1, 2, 2, 2, dtype=torch.bfloat16, device="meta")
    text = torch.empty(1, 1, 4, dtype=torch.bfloat16, device="meta")
    try:
        output = model(inputs, torch.zeros(1, device="meta"), text, return_dict=False)[0]
    except RuntimeError as error:
        return "dtype" in str(error)
    return bool(output.dtype != inputs.dtype)


def patch(latte_transformer_3d: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(self, hidden_states, *args, **kwargs):
            table = getattr(self, _TABLE)
            if table.dtype == hidden_states.dtype:
                return original(self, hidden_states, *args, **kwargs)
            cast = InPlaceOf(self, {_TABLE: table.to(hidden_states.dtype)})
            return original(cast, hidden_states, *args, **kwargs)

        return forward

    draft.wrap_plain(resolve(latte_transformer_3d, "LatteTransformer3DModel"), "forward", make)
