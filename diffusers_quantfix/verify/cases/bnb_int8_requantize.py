"""A quantized 8-bit parameter is moved: its scales must move with it."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Int8Params

    weight = Int8Params(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    weight.CB, weight.SCB = weight.data, torch.full((4,), 0.5)
    if not torch.cuda.is_available():
        moved = weight.to("meta")
        assert moved.SCB.is_meta, f"the weight is on meta, its scales are on {moved.SCB.device}"
        return "the scales are moved with the weight"
    back = weight.to("cuda")
    assert torch.equal(back.SCB.cpu(), weight.SCB), f"the scales became {back.SCB[0].item():g} instead of 0.5"
    return "the scales are unchanged"
