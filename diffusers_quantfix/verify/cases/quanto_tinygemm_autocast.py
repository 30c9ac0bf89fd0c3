"""A TinyGemm int4 layer gets float32 under bfloat16 autocast; PyTorch replaces its kernel, which needs a GPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_kernels

    off = quanto_kernels.product_error(quanto_kernels.tinygemm, torch.randn(4, 64), autocast=True)
    assert off < 0.02, f"relative error {off:.3f}"
    return f"the layer runs; relative error {off:.4f} (PyTorch stands in for the kernel)"
