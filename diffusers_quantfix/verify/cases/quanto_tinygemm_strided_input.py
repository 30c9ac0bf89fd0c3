"""A TinyGemm int4 layer gets half of each row; PyTorch replaces its kernel, which may need a GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_kernels

    given, _ = torch.randn(4, 128, dtype=torch.bfloat16).chunk(2, -1)
    off = quanto_kernels.product_error(quanto_kernels.tinygemm, given)
    assert off < 0.02, f"relative error {off:.3f}"
    return f"the layer runs; relative error {off:.4f} (PyTorch stands in for the kernel)"
