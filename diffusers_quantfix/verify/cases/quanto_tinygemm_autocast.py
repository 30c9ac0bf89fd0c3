"""A TinyGemm int4 layer gets float32 under bfloat16 autocast; PyTorch replaces its kernel, which needs a GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    from types import SimpleNamespace

    import torch
    from optimum.quanto.tensor.weights.tinygemm import qbits

    from ..models import quanto_kernels

    def operators(kernel):
        def multiply(given, matrix, *others):
            return kernel(given, matrix)

        names = ("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu")
        return SimpleNamespace(Tensor=torch.Tensor, **dict.fromkeys(names, multiply))

    def weight(matrix):
        return SimpleNamespace(
            _data=SimpleNamespace(_data=matrix), _scale_shift=matrix, _group_size=128, shape=matrix.shape
        )

    off = quanto_kernels.autocast_error(qbits, "TinyGemmQBitsLinearFunction", operators, weight)
    assert off < 0.02, f"relative error {off:.3f}"
    return f"the layer runs; relative error {off:.4f} (PyTorch stands in for the kernel)"
