"""quanto int8 weights crash or give garbage on a CPU with bfloat16.

Symptom: "Segmentation fault" in a forward pass of a model with ``qint8`` weights and bfloat16 activations on the CPU,
    often right after it was loaded from a checkpoint; with one row of activations nan, inf or other garbage instead.
    Transposed activations raise "A must be contiguous on the last dimension", or up to torch 2.6 "expect A to be
    contiguous". If the model is in float32 or float16, and under autocast, "expected scalar type BFloat16 but found
    Float" or "Half".
Cause: ``torch._weight_int8pack_mm`` reads rows of weights in whole vectors. With AVX512 it needs row lengths that are a
    multiple of 16, and with more than three rows of activations a weight aligned to 16 bytes, which a tensor within a
    safetensors file is not; with AVX2 a multiple of 8. It takes scales of the activations' dtype. quanto only checks
    for a multiple of 4.
Upstream: not reported. quanto: library/qbytes_mm.py; torch: aten/src/ATen/native/cpu/int8mm_kernel.cpp.
Patch: the kernel gets rows padded with zeros to a multiple of 16 and aligned memory, copied if necessary. Zeros change
    no sum. It also gets contiguous rows of activations. Scales of another dtype are multiplied as on a GPU.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="quanto-int8-cpu-kernel",
    module="optimum.quanto.library.qbytes_mm",
    claims={"optimum-quanto": ">=0.2.5,<=0.2.7"},
    harm="wrong result",
    patterns=(
        "_weight_int8pack_mm_cpu : (A must|expect A to) be contiguous",
        r"qbytes_mm.{0,2000}expected scalar type BFloat16 but found (Float|Half)",
        r"\A(?=.*(_weight_int8pack_mm|quanto)).*(Segmentation fault|SIGSEGV|SIGBUS)",
    ),
    frames=("_weight_int8pack_mm", "qbytes_mm"),
    hot=True,
)

_ROW = 16  # bytes, and so many int8 weights


def broken(qbytes_mm: ModuleType) -> bool:
    """Does quanto call the kernel without checking rows and alignment, on a CPU where that goes wrong?"""
    import torch

    function = resolve(qbytes_mm, "qbytes_int8pack_mm")
    return (
        "_weight_int8pack_mm" in function.__code__.co_names
        and "AVX" in torch.backends.cpu.get_cpu_capability()
    )


def patch(qbytes_mm: ModuleType, draft: Draft) -> None:
    from torch.nn.functional import pad

    def make(original):
        def qbytes_int8pack_mm(activations, weights, output_scales):
            if weights.device.type == "cpu":
                if output_scales.dtype != activations.dtype:
                    return qbytes_mm.qbytes_mm(activations, weights, output_scales)
                missing = -weights.shape[-1] % _ROW
                if missing:
                    activations, weights = pad(activations, (0, missing)), pad(weights, (0, missing))
                elif weights.data_ptr() % _ROW:
                    weights = weights.clone()
                if activations.stride(-1) != 1:
                    activations = activations.contiguous()
            return original(activations, weights, output_scales)

        return qbytes_int8pack_mm

    draft.wrap_plain(qbytes_mm, "qbytes_int8pack_mm", make)
