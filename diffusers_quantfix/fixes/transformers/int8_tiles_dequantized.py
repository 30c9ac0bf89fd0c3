"""``dequantize()`` of an 8-bit model that has run reads its weights wrongly.

Symptom: noise after ``dequantize()`` of a model in 8 bits, if the model has run before. No error.
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
    id="transformers-int8-tiles-dequantized",
    title="dequantize() of an 8-bit model of transformers that has run gives noise",
    module="transformers.integrations.bitsandbytes",
    claims={"transformers": ">=4.48.0,<=5.23.0", "bitsandbytes": ">=0.43.0,<0.45.0"},
    upstream=("https://github.com/bitsandbytes-foundation/bitsandbytes/releases/tag/0.45.0",),
    symptom="noise after dequantize() of an 8-bit model of transformers that has run before",
    harm="wrong result",
    frames=("dequantize", "8.?bit|int8"),
    fixed_in="bitsandbytes 0.45.0",
)


def broken(bitsandbytes: ModuleType) -> bool:
    """Does it know nothing of tiles? Newer releases take no bitsandbytes that has tiles."""
    return hasattr(bitsandbytes, "bnb") and takes_tiles_for_rows(
        resolve(bitsandbytes, "dequantize_bnb_weight")
    )


def patch(bitsandbytes: ModuleType, draft: Draft) -> None:
    draft.wrap_plain(bitsandbytes, "dequantize_bnb_weight", rows_for_dequantizing)
