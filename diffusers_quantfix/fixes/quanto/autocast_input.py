"""quanto int4 kernels fail under autocast.

Symptom: with mixed precision (``torch.autocast``, ``Accelerator(mixed_precision="bf16")``) the forward pass of a model
    with ``qint4`` weights raises RuntimeError "expected scalar type Float but found BFloat16", or on a GPU "Expected
    A.dtype() == at::kBFloat16 to be true". A layer behind a normalization, whose output is float32 there, gets it.
Cause: the functions that call the TinyGemm and AWQ kernels pass the input on as it is. Autocast casts for ``linear``
    of torch, in whose place they are called.
Upstream: not reported. The other weights of quanto are multiplied with ``matmul``, for which autocast casts.
Patch: under autocast an input of another dtype is cast to that of the weight, if it is autocast's; else the weight is
    dequantized and multiplied as the others are.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="quanto-autocast-input",
    targets=(
        Target(
            "quanto-tinygemm-autocast",
            "optimum.quanto.tensor.weights.tinygemm.qbits",
            {"optimum-quanto": ">=0.2.5,<=0.2.7"},
        ),
        Target(
            "quanto-awq-autocast",
            "optimum.quanto.tensor.weights.awq.qbits",
            {"optimum-quanto": ">=0.2.5,<=0.2.7"},
        ),
    ),
    patterns=(
        r"quanto/tensor/weights/(tinygemm|awq)/.{0,2000}expected scalar type \w+ but found",
        r"quanto/tensor/weights/tinygemm/.{0,2000}Expected A\.dtype\(\) == at::kBFloat16 to be true",
    ),
    frames=("quanto/tensor/weights/(tinygemm|awq)/qbits.py:forward", "autocast|mixed_precision"),
    hot=True,
    asked_once=True,
)

# The class, and the attribute whose dtype is that of the weight
_KERNELS = {
    "optimum.quanto.tensor.weights.tinygemm.qbits": ("TinyGemmQBitsLinearFunction", "_scale_shift"),
    "optimum.quanto.tensor.weights.awq.qbits": ("AWQWeightQBitsLinearFunction", "_scale"),
}


def broken(qbits: ModuleType) -> bool:
    """Does the function ask nothing about dtypes? The kernels need a GPU."""
    name, _ = _KERNELS[qbits.__name__]
    forward = resolve(qbits, f"{name}.forward")
    return not {"dtype", "to", "is_autocast_enabled"} & names_used(forward)


def patch(qbits: ModuleType, draft: Draft) -> None:
    from torch import Tensor, bfloat16, float16, float32, get_autocast_dtype, is_autocast_enabled
    from torch.amp import is_autocast_available
    from torch.nn import Parameter

    name, scale = _KERNELS[qbits.__name__]
    cls = resolve(qbits, name)
    with_matmul = resolve(qbits, "QuantizedLinearFunction").forward
    plain, cast = (Tensor, Parameter), (float32, bfloat16, float16)  # what autocast casts

    def make(original):
        def forward(ctx, input, other, bias=None):
            dtype, kind = getattr(other, scale).dtype, input.device.type
            if input.dtype == dtype or input.dtype not in cast or type(input) not in plain:
                return original(ctx, input, other, bias)
            if not is_autocast_available(kind) or not is_autocast_enabled(kind):  # meta has none
                return original(ctx, input, other, bias)
            if get_autocast_dtype(kind) == dtype:
                return original(ctx, input.to(dtype), other, bias)
            return with_matmul(ctx, input, other, bias)

        return forward

    draft.wrap_plain(cls, "forward", make)
