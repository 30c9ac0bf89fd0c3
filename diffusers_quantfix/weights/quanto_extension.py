"""The compiled extensions of optimum-quanto: whether they may be built here, and a replacement in PyTorch if not.

quanto compiles C++ (``quanto_cpp``) and CUDA (``quanto_cuda``) code on the user's machine at its first use, with
``torch.utils.cpp_extension.load``. Plain PyTorch operations give the same results.

Upstream: optimum/quanto/library/extensions.
"""

from __future__ import annotations

import platform
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

BUILD, NO_BUILD, MARLIN = "quanto:build", "quanto:no-build", "quanto:marlin"

# gemm_cuda.cu of the AWQ kernels uses __asm__ __volatile__, which Microsoft's compiler does not support.
_WINDOWS_FLAGS = ("-D__asm__=asm", "-D__volatile__=volatile")


def why_not_to_build(options: Collection[str]) -> str:
    """Why no extension is compiled here, as the end of a sentence; "" if it may be compiled.

    Args:
        options: the options in ``DIFFUSERS_QUANTFIX``.
    """
    if NO_BUILD in options:
        return f"was not compiled, as DIFFUSERS_QUANTFIX={NO_BUILD} asks"
    if platform.system() == "Windows" and not {BUILD, MARLIN} & set(options):
        return f"is not compiled on Windows unless DIFFUSERS_QUANTFIX={BUILD} asks for it"
    return ""


def flags_of_this_platform() -> tuple[str, ...]:
    """The flags that nvcc needs besides upstream's; only on Windows are there any."""
    if platform.system() != "Windows":
        return ()
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    # Since torch 2.9, compiled_autograd.h omits on Windows the code that nvcc cannot compile, if USE_CUDA is defined.
    return (*_WINDOWS_FLAGS, "-DUSE_CUDA=1") if (major, minor) >= (2, 9) else _WINDOWS_FLAGS


def cuda_kernels_are_there() -> bool:
    """Whether ``quanto_cuda`` is registered and compiled; the first call compiles it."""
    module = sys.modules.get("optimum.quanto.library.extensions.cuda")
    return module is not None and not isinstance(module.ext.lib, StandIn)


class StandIn:
    """The functions of a compiled extension, implemented with PyTorch operations.

    Args:
        name: the extension, e.g. ``quanto_cpp``.
        reason: why it is missing, as the end of a sentence.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason

    def unpack(self, t: Any, bits: int) -> Any:
        """Values of 2 or 4 bits from uint8 of shape (n, ...): uint8 of shape (n * 8 // bits, ...), same device."""
        import torch

        if t.device.type == "mps":  # has no shift operators
            parts = [t // (1 << shift) for shift in range(0, 8, bits)]
        else:
            parts = [t >> shift for shift in range(0, 8, bits)]
        return torch.cat([part & ((1 << bits) - 1) for part in parts])

    def awq_v2_gemm_f16i4(self, input: Any, other: Any, scales: Any, shift: Any) -> Any:
        """``input`` (..., k) @ dequantized ``other`` (int16, packed by AWQ) -> (..., n); scales, shift (k // 128, n).

        ``shift`` is already scaled and negated.
        """
        from optimum.quanto.tensor.weights.awq.packed import unpack_v2

        integers = unpack_v2(other)
        grouped = integers.reshape(scales.shape[1], scales.shape[0], -1)
        weight = grouped * scales.t().unsqueeze(-1) + shift.t().unsqueeze(-1)
        return input @ weight.reshape(integers.shape).t()

    def awq_v2_gemv_f16i4(self, input: Any, other: Any, scales: Any, shift: Any, *sizes: int) -> Any:
        """As `awq_v2_gemm_f16i4`; the compiled version is another kernel, for few rows."""
        return self.awq_v2_gemm_f16i4(input, other, scales, shift)

    def fp8_marlin_gemm(
        self, a: Any, b_q_weight: Any, b_scales: Any, workspace: Any, num_bits: int, m: int, n: int, k: int
    ) -> Any:
        """``a`` (m, k) @ dequantized float8 weight (int32, packed by Marlin, scales (1, n) permuted) -> (m, n)."""
        from optimum.quanto.tensor.weights.marlin.fp8.packed import MarlinF8PackedTensor, get_scale_perms

        weight = MarlinF8PackedTensor(b_q_weight, (n, k), (k, 1)).unpack()
        order = get_scale_perms().argsort().to(b_scales.device)
        scales = b_scales.reshape(-1, len(order))[:, order].reshape(n, 1)
        return a @ (weight.to(b_scales.dtype) * scales).t()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} needs the extension {self.name}, which {self.reason}")
