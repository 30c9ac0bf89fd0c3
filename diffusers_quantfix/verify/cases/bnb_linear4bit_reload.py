"""A 4-bit layer loads the state dict of another one."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit

    where = four_bit.device()
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(where)
    torch.manual_seed(0)
    source, model = (four_bit.linear(torch.nn.Linear(64, 64), where) for _ in range(2))
    saved = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    with torch.no_grad():
        reference = source(inputs)
        model.load_state_dict(saved)
        assert torch.equal(model(inputs), reference), "the output is not that of the checkpoint"
    return "loaded the weight and its quant state; output exact"
