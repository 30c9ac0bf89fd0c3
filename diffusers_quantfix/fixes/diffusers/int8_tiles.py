"""Dequantizing or merging into an 8-bit model that has run gives noise.

Symptom: noise after ``dequantize()``, ``fuse_lora()`` or ``merge_and_unload()`` of an 8-bit model, or with a DoRA, if
    the model has run before. No error.
Cause: the first forward pass puts the weight into tiles, in the layout of the GPU's tensor cores.
    ``dequantize_bnb_weight`` of diffusers, transformers and peft multiplies the bytes by the row scales, as if they
    were still rows.
Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/releases/tag/0.45.0; bitsandbytes 0.45.0 no longer has
    tiles; not reported for earlier releases.
Patch: the function is given the weight in rows.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...weights.int8_params import rows_for_dequantizing, takes_tiles_for_rows

_TILES, _GONE = {"bitsandbytes": ">=0.43.0,<0.45.0"}, "bitsandbytes 0.45.0"

FIX = Fix(
    __doc__,
    id="int8-tiles-dequantized",
    targets=(
        Target(
            "diffusers-int8-tiles-dequantized",
            "diffusers.quantizers.bitsandbytes.utils",
            {"diffusers": ">=0.33.0,<=0.42.1", **_TILES},
            fixed_in=_GONE,
        ),
        Target(
            "peft-int8-tiles-dequantized",
            "peft.utils.integrations",
            {"peft": ">=0.14.0,<=0.21.2", **_TILES},
            fixed_in=_GONE,
        ),
        Target(
            "transformers-int8-tiles-dequantized",
            "transformers.integrations.bitsandbytes",
            {"transformers": ">=4.48.0,<=5.24.0", **_TILES},
            fixed_in=_GONE,
        ),
    ),
    harm="wrong result",
    frames=("dequantize|merge_and_unload|fuse_lora", "8.?bit|int8"),
    asked_once=True,
)


def broken(module: ModuleType) -> bool:
    """Does it not handle tiles? Newer transformers releases do not accept a bitsandbytes with tiles."""
    if module.__name__.startswith("transformers.") and not hasattr(module, "bnb"):
        return False
    return takes_tiles_for_rows(resolve(module, "dequantize_bnb_weight"))


def patch(module: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(module, "dequantize_bnb_weight", rows_for_dequantizing)
