"""The Marlin linear function adds the bias; PyTorch replaces its kernel, which needs a GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from optimum.quanto.tensor.weights.marlin.fp8 import qbits

    def kernel(a, b_q_weight, **others):
        return a @ b_q_weight.t()

    torch.manual_seed(0)
    given, weight, bias = (torch.randn(*size, dtype=torch.float16) for size in ((3, 64), (128, 64), (128,)))
    packed = SimpleNamespace(
        _data=SimpleNamespace(_data=weight), _scale=torch.ones(1, 128, dtype=torch.float16), _workspace=None
    )
    context = SimpleNamespace(save_for_backward=lambda *tensors: None)
    operators = SimpleNamespace(ops=SimpleNamespace(quanto=SimpleNamespace(gemm_f16f8_marlin=kernel)))
    with mock.patch.object(qbits, "torch", operators):
        output = qbits.MarlinF8QBytesLinearFunction.forward(context, given, packed, bias)
    off = (output.float() - (given @ weight.t() + bias).float()).abs().max().item()
    assert off < 0.01, f"the bias is lost: maximum error {off:.2f}"
    return f"the bias is added; maximum error {off:.4f} (PyTorch stands in for the kernel)"
