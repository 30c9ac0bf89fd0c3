"""quanto float8 weights need nvcc and give noise on NVIDIA GPUs.

Symptom: a noise image from FLUX with float8 weights (``qfloat8``); "Error building extension 'quanto_cuda'",
    "identifier `__asm__` is undefined" if nothing can be compiled (on Windows, without a CUDA toolkit). The noise
    occurs on GPUs of compute capability 8.0 and above.
Cause: ``WeightQBytesTensor.create`` repacks float8 weights for the Marlin kernel without being asked. The kernel's
    linear function never adds the bias (see ``quanto-marlin-bias``).
Upstream: https://github.com/huggingface/optimum-quanto/issues/332 and
    https://github.com/huggingface/optimum-quanto/issues/360, PR 409 (unmerged);
    https://github.com/huggingface/diffusers/issues/10467 and https://github.com/huggingface/diffusers/issues/11540.
Patch: ``create`` returns the plain class, whose linear function casts, scales, multiplies and adds the bias with
    PyTorch on every system, without a compiler. Data already packed by Marlin stays as it is, even when moved from GPU
    to GPU. With ``DIFFUSERS_QUANTFIX=quanto:marlin`` upstream decides as before, if its kernel can be compiled.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights import quanto_extension

FIX = Fix(
    __doc__,
    id="quanto-fp8-plain",
    module="optimum.quanto.tensor.weights.qbytes",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    harm="wrong result",
    patterns=(
        r"\A(?=.*(marlin|float8|fp8)).*(Error building extension '|TORCH_EXTENSION_NAME=)quanto_cuda",
        "identifier '?__asm__'? is undefined",
    ),
    frames=("marlin", "qfloat8|float8|fp8", "optimum/quanto/"),
    hot=True,
    options={
        quanto_extension.MARLIN: "multiply float8 weights with quanto's compiled Marlin kernel on NVIDIA GPUs",
    },
)


def broken(qbytes: ModuleType) -> bool:
    """Does ``create`` itself choose the Marlin class? What it chooses cannot be tried without a GPU."""
    create = resolve(qbytes, "WeightQBytesTensor.create")
    return "MarlinF8QBytesTensor" in getattr(create, "__func__", create).__code__.co_names


def patch(qbytes: ModuleType, draft: Draft) -> None:
    import torch

    plain_class = resolve(qbytes, "WeightQBytesTensor")
    packed_by_marlin = torch.int32
    marlin = quanto_extension.MARLIN in draft.options()

    def make(original):
        def create(qtype, axis, size, stride, data, scale, activation_qtype=None, requires_grad=False):
            if data.dtype == packed_by_marlin:
                return still_packed(qtype, axis, size, stride, data, scale, requires_grad)
            if qtype.is_floating_point and not (
                marlin and data.device.type == "cuda" and quanto_extension.cuda_kernels_are_there()
            ):
                return plain_class(qtype, axis, size, stride, data, scale, activation_qtype, requires_grad)
            return original(qtype, axis, size, stride, data, scale, activation_qtype, requires_grad)

        return create

    draft.wrap_plain(plain_class, "create", make)


def still_packed(*arguments: Any) -> Any:
    """The Marlin class for data moved from GPU to GPU: upstream treats it as plain data."""
    from optimum.quanto.tensor.weights.marlin import MarlinF8QBytesTensor

    return MarlinF8QBytesTensor(*arguments)
