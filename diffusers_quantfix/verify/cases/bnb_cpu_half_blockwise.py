"""A few 16-bit numbers are quantized blockwise on the CPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes import functional

    from ..case import CannotReproduce

    lib = functional.lib
    if not hasattr(lib, "_lib") and not hasattr(lib, "cquantize_blockwise_cpu_fp32"):
        raise CannotReproduce("this bitsandbytes loads no kernels where torch has no CUDA")
    # A slice of a longer tensor, since the kernel reads past its end; read as float32 it has values near 1 too.
    given = torch.tensor([1.75, -1.875, 1.9375, 1.8125] * 8).half()[:8]
    try:
        codes, _ = functional.quantize_blockwise(given)
    except RuntimeError as error:  # bitsandbytes 0.46
        assert "must be float32" in str(error), error
        return "bitsandbytes refuses them with an error"
    expected, _ = functional.quantize_blockwise(given.float())
    wrong = int((codes != expected).sum())
    assert wrong == 0, f"{wrong} of {len(codes)} codes are not those of the numbers"
    return "the codes are those of the same numbers in float32"
