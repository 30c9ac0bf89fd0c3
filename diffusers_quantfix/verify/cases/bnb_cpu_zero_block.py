"""A tensor with a block of zeros is quantized on the CPU: a segmentation fault without the fix."""

from __future__ import annotations

from ..case import CannotReproduce

MAY_CRASH = True


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.cextension import lib
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    if not hasattr(lib, "_lib") and not hasattr(lib, "cquantize_blockwise_cpu_fp32"):
        raise CannotReproduce("bitsandbytes has loaded no native library")
    values = torch.linspace(-1, 1, 1024)
    values[256:512] = 0
    indices, state = quantize_blockwise(values, blocksize=256)
    off = (dequantize_blockwise(indices, state) - values).abs()
    assert not off[256:512].any(), f"zeros became {float(off[256:512].max())}"
    assert off.max() < 0.02, f"off by {float(off.max()):.3f}"
    return f"a block of zeros is quantized on the CPU and stays zero; the others are off by {float(off.max()):.4f}"
