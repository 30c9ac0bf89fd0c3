"""A LoHa cannot run on 4-bit or GGUF layers.

Symptom: RuntimeError "mat1 and mat2 shapes cannot be multiplied (4x64 and 1x2048)", or with other sizes, from the
    forward pass of a 4-bit or GGUF model with a LoHa.
Cause: ``update_layer`` and ``get_delta_weight`` take the shape of ``base_layer.weight``, which is that of the packed
    bytes, for that of the layer.
Upstream: not reported.
Patch: a linear layer is asked for its numbers of features.
"""

from __future__ import annotations

from types import ModuleType

from ...adapters.packed_shapes import asks_for_shapes, reads_shape_of_weight
from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    id="peft-loha-packed-weight",
    title="a LoHa cannot run on 4-bit or GGUF layers",
    module="peft.tuners.loha.layer",
    claims={"peft": ">=0.13.2,<=0.21.2"},
    upstream=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/loha/layer.py",),
    symptom="RuntimeError: mat1 and mat2 shapes cannot be multiplied, with a LoHa on a 4-bit or GGUF model",
    # the message alone is that of any layer
    patterns=(
        r"tuners/loha.{0,2000}mat1 and mat2 shapes cannot be multiplied",
        r"shapes cannot be.{0,200}\bLoHa\b",
    ),
    frames=(r"tuners/loha", "loha"),
    hot=True,
    since="0.1.0",
)


def broken(layer: ModuleType) -> bool:
    return reads_shape_of_weight(resolve(layer, "LoHaLayer"))


def patch(layer: ModuleType, draft: Draft) -> None:
    """Replace the code of ``update_layer`` and ``get_delta_weight``."""
    asks_for_shapes(layer, "LoHaLayer", ("update_layer", "get_delta_weight"), draft)
