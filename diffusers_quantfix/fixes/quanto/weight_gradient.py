"""The gradient of a quanto weight needs contiguous tensors.

Symptom: a backward pass through a model with quanto weights, as in each step of StableDiffusionPix2PixZeroPipeline,
    raises RuntimeError "view size is not compatible with input tensor's size and stride".
Cause: quanto weights keep ``requires_grad`` even if only the input's gradient is needed; ``backward`` of their linear
    function flattens the layer's input and the gradient of its output with ``view``, which needs contiguous tensors.
    ``torch.nn.Linear`` accepts any tensor.
Upstream: not reported.
Patch: if the weight's gradient is requested, ``backward`` gets contiguous tensors, copied if necessary.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.quanto_backward import BackwardContext

FIX = Fix(
    __doc__,
    id="quanto-weight-gradient",
    module="optimum.quanto.tensor.function",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    patterns=(
        r"quanto/tensor/function.{0,2000}view size is not compatible with input tensor's size and stride",
    ),
    frames=("quanto/tensor/function.py:backward",),
    hot=True,
    since="0.1.0",
)


def broken(function: ModuleType) -> bool:
    """Request the gradient of a weight of one number, with an output gradient that ``view`` cannot flatten.

    On meta: the first product of numbers on the CPU would make MKL read the program's settings for good.
    """
    from torch import zeros

    gradient = zeros(2, 2, 1, device="meta").transpose(0, 1)
    taken, weight = zeros(2, 2, 1, device="meta"), zeros(1, 1, device="meta")
    context = BackwardContext(taken, weight, (False, True, False))
    try:
        resolve(function, "QuantizedLinearFunction.backward")(context, gradient)
    except RuntimeError as error:
        return "view size" in str(error)
    return False


def patch(function: ModuleType, draft: Draft) -> None:
    def make(original):
        def backward(ctx, gO):
            if not ctx.needs_input_grad[1]:
                return original(ctx, gO)
            taken, weight = ctx.saved_tensors
            return original(
                BackwardContext(taken.contiguous(), weight, ctx.needs_input_grad), gO.contiguous()
            )

        return backward

    draft.wrap_plain(resolve(function, "QuantizedLinearFunction"), "backward", make)
