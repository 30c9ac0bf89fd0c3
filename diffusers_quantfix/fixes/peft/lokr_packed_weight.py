"""A LoKr cannot run on 4-bit or GGUF layers.

Symptom: RuntimeError "shape '[2048, 1]' is invalid for input of size 4096", or with other sizes, from the forward
    pass of a 4-bit or GGUF model with a LoKr.
Cause: ``get_delta_weight`` gives its product the shape of ``base_layer.weight``, which is that of the packed bytes.
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
    id="peft-lokr-packed-weight",
    title="a LoKr cannot run on 4-bit or GGUF layers",
    module="peft.tuners.lokr.layer",
    claims={"peft": ">=0.13.2,<=0.21.2"},
    upstream=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lokr/layer.py",),
    symptom="RuntimeError: shape '[2048, 1]' is invalid for input of size 4096, with a LoKr on a 4-bit or GGUF model",
    patterns=(r"shape .\[\d+, \d+\]. is invalid for input of size \d+",),
    frames=(r"tuners/lokr", "lokr"),
    hot=True,
    since="0.1.0",
)


def broken(layer: ModuleType) -> bool:
    return reads_shape_of_weight(resolve(layer, "LoKrLayer"))


def patch(layer: ModuleType, draft: Draft) -> None:
    """Replace the code of ``get_delta_weight``."""
    asks_for_shapes(layer, "LoKrLayer", ("get_delta_weight",), draft)
