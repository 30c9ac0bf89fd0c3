"""An 8-bit weight that stays in 16 bits is moved from the CPU, as the loaders do."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Int8Params

    from ..case import NeedsDevice

    weight = Int8Params(torch.ones(4, 4, dtype=torch.float16), requires_grad=False, has_fp16_weights=True)
    if torch.cuda.is_available():
        moved = weight.to("cuda")
    elif hasattr(weight, "_quantize"):
        moved = weight._quantize(torch.device("meta"))
    else:
        raise NeedsDevice("needs a CUDA device")
    assert isinstance(moved, Int8Params), f"the moved weight is a {type(moved).__name__}"
    return "the moved weight is an Int8Params"
