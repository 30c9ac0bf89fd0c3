"""Layers of quanto whose kernels need a GPU, for the cases: PyTorch stands in for the kernel."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def autocast_error(qbits: Any, function: str, operators: Any, weight: Any) -> float:
    """Multiply a float32 input under bfloat16 autocast with the function ``function`` of quanto's module ``qbits``.

    Args:
        qbits: the module.
        function: the name of the ``torch.autograd.Function``.
        operators: makes what the module finds as ``torch``, from a kernel that takes an input and a plain weight.
        weight: makes the packed weight from a plain one.

    Returns:
        The maximum error of the output, as a part of the greatest value.
    """
    from types import SimpleNamespace
    from unittest import mock

    import torch

    def kernel(input: Any, matrix: Any) -> Any:
        with torch.autocast("cpu", enabled=False):  # kernels do not cast
            return input @ matrix.t()

    torch.manual_seed(0)
    given, matrix = torch.randn(4, 64), torch.randn(128, 64, dtype=torch.bfloat16)
    context = SimpleNamespace(save_for_backward=lambda *tensors: None)
    with mock.patch.object(qbits, "torch", operators(kernel)), torch.autocast("cpu", dtype=torch.bfloat16):
        output = getattr(qbits, function).forward(context, given, weight(matrix), None)
    expected = given @ matrix.float().t()
    return float((output.float() - expected).abs().max() / expected.abs().max())
