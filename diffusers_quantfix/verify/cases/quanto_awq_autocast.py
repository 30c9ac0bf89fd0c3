"""An AWQ int4 layer gets float32 under bfloat16 autocast; PyTorch replaces its kernel, which needs a GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    from types import SimpleNamespace

    import torch
    from optimum.quanto.tensor.weights.awq import qbits

    from ..models import quanto_kernels

    def operators(kernel):
        def multiply(given, matrix, *others, **sizes):
            return kernel(given, matrix)

        ops = SimpleNamespace(quanto=SimpleNamespace(gemm_f16i4_awq=multiply))
        return SimpleNamespace(Tensor=torch.Tensor, ops=ops)

    def weight(matrix):
        return SimpleNamespace(
            _data=SimpleNamespace(_data=matrix),
            _scale=matrix,
            _shift=None,
            _group_size=128,
            shape=matrix.shape,
        )

    off = quanto_kernels.autocast_error(qbits, "AWQWeightQBitsLinearFunction", operators, weight)
    assert off < 0.02, f"relative error {off:.3f}"
    return f"the layer runs; relative error {off:.4f} (PyTorch stands in for the kernel)"
