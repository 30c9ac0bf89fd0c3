"""HunyuanDiT refuses group offloading.

Symptom: ValueError "HunyuanDiT2DModel does not support group offloading" from ``enable_group_offload``, quantized or
    not.
Cause: its pooling layer reads the weights of four layers and calls none of them, so that no hook onloads them.
Upstream: https://github.com/huggingface/diffusers/pull/10503 gives that as the reason.
Patch: it is allowed: ``diffusers-hunyuan-pooler-weights`` calls these layers where a hook has to onload them.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...offloading.allowed import allow_group_offload, refuses_group_offload

FIX = Fix(
    __doc__,
    id="diffusers-hunyuan-dit-group-offload",
    module="diffusers.models.transformers.hunyuan_transformer_2d",
    claims={"diffusers": ">=0.33.0,<=0.42.1"},
    harm="error",
    patterns=("HunyuanDiT2DModel does not support group offloading",),
    frames=("enable_group_offload", "HunyuanDiT"),
    since="0.1.0",
)

_MODEL = "HunyuanDiT2DModel"


def broken(hunyuan_transformer_2d: ModuleType) -> bool:
    """Does the model say that it cannot be offloaded in groups?"""
    return refuses_group_offload(hunyuan_transformer_2d, _MODEL)


def patch(hunyuan_transformer_2d: ModuleType, draft: Draft) -> None:
    allow_group_offload(draft, hunyuan_transformer_2d, _MODEL)
