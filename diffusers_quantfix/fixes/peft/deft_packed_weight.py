"""A new DEFT on 8-bit layers makes noise, and cannot be added to 4-bit or GGUF ones.

Symptom: with a new DEFT the output of an 8-bit bitsandbytes model is noise, a hundred times too large, without an
    error, until its R is trained or loaded; with 4-bit weights RuntimeError "mat1 and mat2 shapes cannot be
    multiplied", with GGUF weights "The size of tensor a (64) must match the size of tensor b (68)".
Cause: ``reset_deft_parameters`` computes the R that makes the adapter a no-op from ``base_layer.weight``: from int8
    codes without their row scales, or from packed bytes.
Upstream: https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/deft/layer.py; not reported.
Patch: it computes R from the dequantized weight, which peft has a function for; a bitsandbytes weight that is not
    packed yet, or never will be, is used as it is.
"""

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType

from ...engine.draft import Draft
from ...engine.errors import TargetMissing
from ...engine.fix import Fix
from ...engine.source import exchanged, own_function

FIX = Fix(
    __doc__,
    id="peft-deft-packed-weight",
    module="peft.tuners.deft.layer",
    claims={"peft": ">=0.20.0,<=0.21.2"},
    # any layer may raise the message alone
    patterns=(r"tuners/deft.{0,2000}(mat1 and mat2 shapes cannot be multiplied|The size of tensor a)",),
    harm="wrong result",
    frames=(r"tuners/deft", r"\bDEFT\b|DeftConfig"),
    since="0.1.0",
    asked_once=True,
)

_OF_THE_WEIGHT = "W = transpose(base_weight.detach().to(torch.float32), self.fan_in_fan_out)"
_DEQUANTIZED = """from peft.utils.integrations import dequantize_module_weight
kind, state = type(base_weight).__name__, getattr(base_weight, "quant_state", None)
waits = kind in ("Params4bit", "Int8Params") and state is None and base_weight.is_floating_point()
weight = base_weight if waits else dequantize_module_weight(self.get_base_layer())
W = transpose(weight.detach().to(torch.float32), self.fan_in_fan_out)"""


def broken(layer: ModuleType) -> bool:
    """Does its source use the weight as it is?"""
    try:
        _corrected(layer)
    except TargetMissing:
        return False
    return True


def patch(layer: ModuleType, draft: Draft) -> None:
    function, code = _corrected(layer)
    draft.replace(function, "__code__", code)


def _corrected(layer: ModuleType) -> tuple[FunctionType, CodeType]:
    function = own_function(layer, "DeftLayer.reset_deft_parameters")
    return function, exchanged(function, _OF_THE_WEIGHT, _DEQUANTIZED)
