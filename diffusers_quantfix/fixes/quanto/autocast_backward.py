"""quanto's backward pass fails under autocast.

Symptom: with mixed precision the backward pass of an optimum-quanto LoRA raises RuntimeError "expected m1 and m2 to
    have the same dtype, but got: c10::BFloat16 != float".
Cause: ``QuantizedLinearFunction.backward`` multiplies the gradient, which has the dtype of autocast, with the weight.
Upstream: not reported.
Patch: ``backward`` gets the weight, dequantized, and the layer's input in the gradient's dtype.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.quanto_backward import BackwardContext
from ...weights.wrappers import is_wrapper

FIX = Fix(
    __doc__,
    id="quanto-autocast-backward",
    module="optimum.quanto.tensor.function",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(r"quanto/tensor/function.{0,4000}expected m1 and m2 to have the same dtype",),
    frames=("quanto/tensor/function.py:backward",),
    hot=True,
)


def broken(function: ModuleType) -> bool:
    """Request the gradient of a layer's input in another dtype, for no rows: no library for products is called."""
    from torch import float16, zeros

    context = BackwardContext(zeros(0, 1), zeros(1, 1), (True, False, False))
    try:
        resolve(function, "QuantizedLinearFunction.backward")(context, zeros(0, 1, dtype=float16))
    except RuntimeError as error:
        return "dtype" in str(error)
    return False


def patch(function: ModuleType, draft: Draft) -> None:
    from torch import is_autocast_enabled
    from torch.amp import is_autocast_available

    def make(original):
        def backward(ctx, gO):
            # Read once: torch's checkpoint returns them only once.
            taken, weight = ctx.saved_tensors
            dtype, (of_input, of_weight, *_) = gO.dtype, ctx.needs_input_grad
            # Inside autocast a product casts both factors, and a quantized one refuses.
            kind = gO.device.type
            autocast = is_autocast_available(kind) and is_autocast_enabled(kind)  # meta has none
            if of_input and (autocast or weight.dtype != dtype):
                weight = _plain(weight).to(dtype)
            if of_weight and (autocast or taken.dtype != dtype):
                taken = _plain(taken).to(dtype)
            return original(BackwardContext(taken, weight, ctx.needs_input_grad), gO)

        return backward

    draft.wrap_plain(resolve(function, "QuantizedLinearFunction"), "backward", make)


def _plain(tensor: Any) -> Any:
    return tensor.dequantize() if is_wrapper(tensor) else tensor
