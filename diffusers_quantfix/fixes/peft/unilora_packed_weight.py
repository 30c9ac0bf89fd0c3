"""A UniLora on 4-bit, 8-bit or GGUF layers has no effect.

Symptom: with packed weights the output of a model with a UniLora is the same as without it, and training it changes
    nothing, without an error.
Cause: ``update_scaling`` converts the scales of the two factors, which are between 0 and 1, to the dtype of
    ``base_layer.weight``. For packed weights that is an integer type (uint8, int8), in which they become 0 (an index
    used only once keeps its scale of 1).
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/unilora/layer.py; not reported.
Patch: if the weight's dtype is not floating, the scales keep their own type, float32.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged, own_function

FIX = Fix(
    __doc__,
    id="peft-unilora-packed-weight",
    module="peft.tuners.unilora.layer",
    claims={"peft": ">=0.20.0,<=0.21.2"},
    harm="wrong result",
    frames=(r"unilora",),
    since="0.1.0",
)

_METHOD = "UniLoraLayer.update_scaling"
_OF_THE_WEIGHT = "target_dtype = base_layer.weight.dtype"
_FLOATING = f"{_OF_THE_WEIGHT} if base_layer.weight.is_floating_point() else unilora_scales_A.dtype"


def broken(layer: ModuleType) -> bool:
    """Pass it a layer with a byte weight, and the scale 0.5: does the scale become an integer?"""
    from types import SimpleNamespace

    import torch

    update_scaling, half = resolve(layer, _METHOD), torch.full((1,), 0.5)
    base = SimpleNamespace(weight=torch.zeros(1, dtype=torch.uint8))
    asked = SimpleNamespace(
        unilora_theta_d={"default": half},
        unilora_scales_A={},
        unilora_scales_B={},
        get_base_layer=lambda: base,
        _move_indices_to_device=lambda *args: None,
    )
    try:
        update_scaling(asked, "default", half, half)
    except AttributeError:  # it reads more from the layer
        return False
    return any(
        not scale.is_floating_point()
        for scale in (*asked.unilora_scales_A.values(), *asked.unilora_scales_B.values())
    )


def patch(layer: ModuleType, draft: Draft) -> None:
    function = own_function(layer, _METHOD)
    draft.replace(function, "__code__", exchanged(function, _OF_THE_WEIGHT, _FLOATING))
