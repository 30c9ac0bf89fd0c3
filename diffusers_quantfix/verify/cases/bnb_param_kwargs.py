"""A 4-bit parameter marked by transformers 5 is rebuilt from its attributes."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Int8Params, Params4bit

    for cls in (Params4bit, Int8Params):
        old = cls(torch.ones(4, 4), requires_grad=False)
        old._is_hf_initialized = True
        cls(old.data, requires_grad=False, **vars(old))  # as accelerate does to move it to another device
    return "rebuilt a Params4bit and an Int8Params from the attributes of a marked one"
