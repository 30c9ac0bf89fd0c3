"""A 4-bit checkpoint with more modules than the model cannot be loaded.

Symptom: AttributeError "T5EncoderModel has no attribute `decoder`", from ``from_pretrained`` of a text encoder whose
    checkpoint is that of the whole 4-bit model.
Cause: ``Bnb4BitHfQuantizer.param_needs_quantization`` returns True for every quant state by its name, even for modules
    that the model does not have; ``create_quantized_param`` then looks for the module. The weights themselves have been
    dropped by then.
Upstream: not reported; 5.0.0 loads differently.
Patch: a quant state of a weight that the model does not have is skipped, like the weight.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.places import parameters_at

FIX = Fix(
    __doc__,
    id="transformers-4bit-part-of-checkpoint",
    module="transformers.quantizers.quantizer_bnb_4bit",
    claims={"transformers": ">=4.57.1,<5.0.0", "bitsandbytes": ""},
    patterns=(r"EncoderModel has no attribute \W?decoder",),
    frames=("quantizer_bnb_4bit.py:create_quantized_param", "get_module_from_name"),
    fixed_in="transformers 5.0.0",
    since="0.1.0",
)

_NAME = "create_quantized_param"


def broken(quantizer_bnb_4bit: ModuleType) -> bool:
    """Pass it a quant state of a weight that the model does not have."""
    import torch

    upstream = resolve(quantizer_bnb_4bit, "Bnb4BitHfQuantizer")
    if _NAME not in vars(upstream):  # from 5.0.0 on it loads differently
        return False

    class Quantizer(upstream):  # type: ignore[misc, valid-type]
        pre_quantized = True
        bnb_keys = ("absmax",)

        def __init__(self) -> None:
            pass

    try:
        Quantizer().create_quantized_param(torch.nn.Module(), torch.zeros(1), "gone.weight.absmax", "cpu")
    except AttributeError:
        return True
    return False


def patch(quantizer_bnb_4bit: ModuleType, draft: Draft) -> None:
    def make(original):
        def create_quantized_param(self, *args, **kwargs):
            if self.pre_quantized and not _has(self, *args, **kwargs):
                return None
            return original(self, *args, **kwargs)

        return create_quantized_param

    draft.wrap_plain(resolve(quantizer_bnb_4bit, "Bnb4BitHfQuantizer"), _NAME, make)


def _has(quantizer: Any, model: Any, param_value: Any, param_name: str, *args: Any, **kwargs: Any) -> bool:
    parameters, name = parameters_at(model, quantizer.get_param_name(param_name))
    return name in parameters
