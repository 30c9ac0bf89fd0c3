"""An AWQ int4 layer gets a slice of a batch of sequences; PyTorch replaces its kernel, which needs a GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from optimum.quanto.tensor.weights.awq import qbits

    torch.manual_seed(0)
    given, matrix = torch.randn(2, 6, 64)[:, 2:], torch.randn(128, 64)

    def kernel(input, other, *others, rows, in_cols, **sizes):
        """Reads row after row from the address of the input, as upstream's gemm_cuda.cu does."""
        return torch.as_strided(input, (rows, in_cols), (in_cols, 1)).view(2, 4, in_cols) @ other.t()

    packed = SimpleNamespace(
        _data=SimpleNamespace(_data=matrix),
        _scale=torch.ones(1),
        _shift=None,
        _group_size=128,
        shape=matrix.shape,
    )
    context = SimpleNamespace(save_for_backward=lambda *tensors: None)
    operators = SimpleNamespace(
        Tensor=torch.Tensor, ops=SimpleNamespace(quanto=SimpleNamespace(gemm_f16i4_awq=kernel))
    )
    with mock.patch.object(qbits, "torch", operators):
        output = qbits.AWQWeightQBitsLinearFunction.forward(context, given, packed, None)
    off = (output - given @ matrix.t()).abs().max().item()
    assert off < 0.01, f"the kernel reads other rows: maximum error {off:.2f}"
    return (
        f"the kernel reads the rows of the input; maximum error {off:.4f} (PyTorch stands in for the kernel)"
    )
