"""Merging a LoRA into the weights of an 8-bit model that has run reads its weights wrongly.

Symptom: noise after ``fuse_lora()`` or ``merge_and_unload()`` of a model in 8 bits, or with a DoRA, if the model has
    run before. No error.
Cause: the first forward pass puts the weight into tiles, in the layout of the GPU's tensor cores.
    ``dequantize_bnb_weight`` multiplies the bytes by the scales of their rows, as if they were rows still.
Upstream: bitsandbytes 0.45.0 no longer has tiles; not reported for earlier releases.
Patch: the function is given the weight in rows.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.int8_params import rows_for_dequantizing, takes_tiles_for_rows

FIX = Fix(
    id="peft-int8-tiles-dequantized",
    title="merging a LoRA into an 8-bit model that has run gives noise",
    module="peft.utils.integrations",
    claims={"peft": ">=0.14.0,<=0.21.2", "bitsandbytes": ">=0.43.0,<0.45.0"},
    upstream=("https://github.com/bitsandbytes-foundation/bitsandbytes/releases/tag/0.45.0",),
    symptom="noise after fuse_lora() or merge_and_unload() of an 8-bit model that has run before",
    harm="wrong result",
    frames=("merge_and_unload|fuse_lora", "8.?bit|int8"),
    fixed_in="bitsandbytes 0.45.0",
)


def broken(integrations: ModuleType) -> bool:
    """Does it know nothing of tiles?"""
    return takes_tiles_for_rows(resolve(integrations, "dequantize_bnb_weight"))


def patch(integrations: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(integrations, "dequantize_bnb_weight", rows_for_dequantizing)
