"""Layers of quanto whose kernels need a GPU, for the cases: PyTorch stands in for the kernel."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def product_error(multiply: Callable[[Any, Any, Any], Any], given: Any, autocast: bool = False) -> float:
    """Multiply with one of quanto's functions.

    Args:
        multiply: called with a kernel, which takes an input and a matrix, with the input and with the matrix.
        given: the input, of 64 features.
        autocast: whether to do so under bfloat16 autocast.

    Returns:
        The maximum error of the output, as a part of the greatest value.
    """
    import torch

    def kernel(given: Any, matrix: Any) -> Any:
        with torch.autocast("cpu", enabled=False):  # kernels do not cast
            return given.view(given.numel()).view(-1, 64) @ matrix.t()

    torch.manual_seed(0)
    matrix = torch.randn(128, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = multiply(kernel, given, matrix)
    expected = given.float() @ matrix.float().t()
    return float((output.float() - expected).abs().max() / expected.abs().max())


def tinygemm(kernel: Any, given: Any, matrix: Any) -> Any:
    """``TinyGemmQBitsLinearFunction`` with ``kernel``."""
    from optimum.quanto.tensor.weights.tinygemm import qbits

    def multiply(given: Any, matrix: Any, *others: Any) -> Any:
        return kernel(given, matrix)

    names = ("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu")
    forward = qbits.TinyGemmQBitsLinearFunction.forward
    return _called(qbits, forward, dict.fromkeys(names, multiply), given, matrix)


def awq(kernel: Any, given: Any, matrix: Any) -> Any:
    """``AWQWeightQBitsLinearFunction`` with ``kernel``."""
    from types import SimpleNamespace

    from optimum.quanto.tensor.weights.awq import qbits

    def multiply(given: Any, matrix: Any, *others: Any, **sizes: Any) -> Any:
        return kernel(given, matrix)

    ops = SimpleNamespace(quanto=SimpleNamespace(gemm_f16i4_awq=multiply))
    return _called(qbits, qbits.AWQWeightQBitsLinearFunction.forward, {"ops": ops}, given, matrix)


def _called(qbits: Any, forward: Any, operators: dict[str, Any], given: Any, matrix: Any) -> Any:
    from types import SimpleNamespace
    from unittest import mock

    import torch

    packed = SimpleNamespace(
        _data=SimpleNamespace(_data=matrix), _scale=matrix, _shift=None, _scale_shift=matrix, _group_size=128,
        shape=matrix.shape,
    )  # fmt: skip
    context = SimpleNamespace(save_for_backward=lambda *tensors: None)
    with mock.patch.object(qbits, "torch", SimpleNamespace(Tensor=torch.Tensor, **operators)):
        return forward(context, given, packed, None)
