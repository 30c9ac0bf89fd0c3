"""The state dict of a 4-bit model as torch.distributed.checkpoint reads it."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from ..models import four_bit

    torch.manual_seed(0)
    model = torch.nn.Sequential(four_bit.linear(torch.nn.Linear(64, 64), four_bit.device()))
    expected = model.state_dict()
    got = get_model_state_dict(model)
    assert got.keys() == expected.keys(), "the names are not those of the state dict"
    assert all(torch.equal(got[name], expected[name]) for name in got), (
        "the tensors are not those of the state dict"
    )
    return "all tensors of the state dict, under its names"
