"""dequantize() of a 4-bit model with a floating quant_storage gives weights of the wrong dtype.

Symptom: RuntimeError "self and mat2 must have the same dtype, but got BFloat16 and Half" in the first run after
    ``dequantize()`` of a bfloat16 model whose packed bytes are stored as float16 or float32.
Cause: ``dequantize_and_replace`` casts the weights to ``model.dtype``, which is that of the packed bytes.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/bitsandbytes/utils.py; not
    reported.
Patch: a weight that would be cast to the dtype of its packed bytes gets the dtype it had before quantization.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import function_of, resolve

FIX = Fix(
    __doc__,
    id="diffusers-dequantize-storage",
    module="diffusers.quantizers.bitsandbytes.utils",
    claims={"diffusers": ">=0.34.0,<=0.42.1"},
    patterns=(r"must have the same dtype.{0,400}quant_storage",),
    frames=("dequantize", "quant_storage"),
    since="0.1.0",
    asked_once=True,
)


def broken(utils: ModuleType) -> bool:
    """Does it cast 4-bit weights to the dtype it is given?"""
    function = resolve(utils, "dequantize_bnb_weight")
    texts = [text for text in function_of(function).__code__.co_consts if isinstance(text, str)]
    return any("type-casted" in text for text in texts)


def patch(utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def dequantize_bnb_weight(weight, state=None, dtype=None):
            quant_state = getattr(weight, "quant_state", None)
            if quant_state is not None and dtype == weight.dtype:
                dtype = quant_state.dtype
            return original(weight, state, dtype)

        return dequantize_bnb_weight

    draft.wrap_plain(utils, "dequantize_bnb_weight", make)
