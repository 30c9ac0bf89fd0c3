"""A LoHa or LoKr cannot run on 4-bit or GGUF layers.

Symptom: RuntimeError from the forward pass of a 4-bit or GGUF model: "mat1 and mat2 shapes cannot be multiplied (4x64
    and 1x2048)" with a LoHa, "shape '[2048, 1]' is invalid for input of size 4096" with a LoKr, or with other sizes.
Cause: ``update_layer`` and ``get_delta_weight`` of a LoHa, and ``get_delta_weight`` of a LoKr, use the shape of
    ``base_layer.weight``, which is that of the packed bytes, as the layer's shape.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/loha/layer.py,
    https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lokr/layer.py; not reported.
Patch: for a linear layer, the shape comes from its numbers of features.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.packed_shapes import asks_for_shapes, reads_shape_of_weight
from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve

_METHODS = {
    "peft.tuners.loha.layer": ("LoHaLayer", ("update_layer", "get_delta_weight")),
    "peft.tuners.lokr.layer": ("LoKrLayer", ("get_delta_weight",)),
}

FIX = Fix(
    __doc__,
    id="peft-packed-shapes",
    targets=(
        Target(
            "peft-loha-packed-weight",
            "peft.tuners.loha.layer",
            {"peft": ">=0.13.2,<=0.21.2"},
        ),
        Target(
            "peft-lokr-packed-weight",
            "peft.tuners.lokr.layer",
            {"peft": ">=0.13.2,<=0.21.2"},
        ),
    ),
    patterns=(
        # any layer may raise the message alone
        r"tuners/loha.{0,2000}mat1 and mat2 shapes cannot be multiplied",
        r"shapes cannot be.{0,200}\bLoHa\b",
        r"shape .\[\d+, \d+\]. is invalid for input of size \d+",
    ),
    frames=(r"tuners/lo(ha|kr)", "loha|lokr"),
    hot=True,
)


def broken(layer: ModuleType) -> bool:
    return reads_shape_of_weight(resolve(layer, _METHODS[layer.__name__][0]))


def patch(layer: ModuleType, draft: Draft) -> None:
    """Replace the code of the methods."""
    asks_for_shapes(layer, *_METHODS[layer.__name__], draft)
