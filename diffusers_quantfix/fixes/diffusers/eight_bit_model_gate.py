"""8-bit diffusers models refuse to move, and to load with accelerate 1.13.

Symptom: ValueError "`.to` is not supported for `8-bit` bitsandbytes models. Please use the model as it is", from
    ``model.to(...)``; with accelerate >= 1.13 and bitsandbytes >= 0.48 from every ``from_pretrained`` in 8-bit.
Cause: ``ModelMixin.to`` and ``.cuda`` raise for 8-bit models, always up to 0.36.0, and from 0.37.0 on if bitsandbytes
    is older than 0.48.0. accelerate 1.13.0 loads a model and then calls ``model.to(device)`` if bitsandbytes can move
    it; older releases put hooks on it instead.
Upstream: https://github.com/huggingface/diffusers/pull/12972 (0.37.0) allows the move.
Patch: both methods allow an 8-bit model to move if the whole model moves (``bnb-linear8bit-move``), or to the device it
    is already on; a call without a device (``to(memory_format=...)``) passes. Casts, and moves of models that are
    spread over devices or offloaded, are left to upstream.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, texts_of
from ...models import eight_bit_model

FIX = Fix(
    __doc__,
    id="diffusers-8bit-model-gate",
    module="diffusers.models.modeling_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "bitsandbytes": ">=0.43.0"},
    patterns=("is not supported for (8-bit )?bitsandbytes models",),
    frames=("diffusers/models/modeling_utils.py", "accelerate/big_modeling.py:dispatch_model"),
    fixed_in="diffusers 0.37.0 with bitsandbytes 0.48.0",
    asked_once=True,
)


def broken(modeling_utils: ModuleType) -> bool:
    """Look for the message, and for the version it depends on: building a model here would import too much."""
    to = resolve(modeling_utils, "ModelMixin.to")
    said = texts_of(to)
    if "`.to` is not supported for `8-bit`" in said:
        return True
    return "is not supported for `8-bit`" in said and modeling_utils.is_bitsandbytes_version("<", "0.48.0")


def patch(modeling_utils: ModuleType, draft: Draft) -> None:
    eight_bit_model.open_gates(resolve(modeling_utils, "ModelMixin"), draft)
