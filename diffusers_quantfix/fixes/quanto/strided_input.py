"""quanto 8-bit weights do not accept input that is not contiguous.

Symptom: RuntimeError "view size is not compatible with input tensor's size and stride", in the forward pass of a model
    with ``qint8`` or ``qfloat8`` weights, when a layer gets part of a batch of sequences or a transposed tensor; with
    ``qint4`` weights in bfloat16 on a GPU too. ``torch.nn.Linear`` accepts any input.
Cause: ``WeightQBytesLinearFunction``, and those of TinyGemm and Marlin, flatten their input with ``view``.
Upstream: https://github.com/huggingface/optimum-quanto/issues/327 and
    https://github.com/huggingface/optimum-quanto/issues/339; 0.2.6 flattens with ``reshape``.
Patch: an input that is not contiguous is flattened with ``reshape`` first; the original input is saved for the backward
    pass.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="quanto-strided-input",
    module="optimum.quanto.tensor.weights",
    claims={"optimum-quanto": ">=0.2.5,<0.2.6"},
    patterns=(
        r"quanto/tensor/weights/.{0,2000}view size is not compatible with input tensor's size and stride",
    ),
    frames=(
        "quanto/tensor/weights/qbytes.py:forward",
        "quanto/tensor/weights/tinygemm/qbits.py:forward",
        "quanto/tensor/weights/marlin/fp8/qbits.py:forward",
    ),
    fixed_in="optimum-quanto 0.2.6",
    hot=True,
    since="0.1.0",
    asked_once=True,
)

# The last two are in modules that quanto imports when it makes the first weight of that kind.
_FUNCTIONS = {
    ".qbytes": "WeightQBytesLinearFunction",
    ".tinygemm.qbits": "TinyGemmQBitsLinearFunction",
    ".marlin.fp8.qbits": "MarlinF8QBytesLinearFunction",
}


def broken(weights: ModuleType) -> bool:
    """Does the function flatten its input with ``view``? The product that it calls is not defined yet."""
    forward = resolve(weights, "qbytes.WeightQBytesLinearFunction").forward
    return "view" in names_used(forward)


def patch(weights: ModuleType, draft: Draft) -> None:
    def make(original):
        def forward(ctx, input, other, bias=None):
            if input.is_contiguous():
                return original(ctx, input, other, bias)
            output = original(ctx, input.reshape(-1, input.shape[-1]), other, bias)
            ctx.save_for_backward(input, other)
            return output.reshape(*input.shape[:-1], output.shape[-1])

        return forward

    for module, name in _FUNCTIONS.items():
        cls = resolve(importlib.import_module(weights.__name__ + module), name)
        draft.wrap_plain(cls, "forward", make)
