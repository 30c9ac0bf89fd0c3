"""The attention of an image encoder under sequential offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)).eval()
    inputs = torch.randn(1, 4, 32, device=where)
    expected = model.to(where)(inputs)
    cpu_offload(model.cpu(), where)
    assert torch.equal(model(inputs), expected), "the output differs"
    return "runs"
