"""An 8-bit layer gets an input of four dimensions."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import eight_bit

    where = eight_bit.device()
    layer = eight_bit.layers(where, 1)
    inputs = torch.linspace(-1, 1, 2 * 3 * 4 * eight_bit.FEATURES).view(2, 3, 4, -1).half().to(where)
    with torch.no_grad():
        expected = layer(inputs.flatten(0, 2)).view(2, 3, 4, -1)
        assert torch.equal(layer(inputs), expected), "not what the rows give"
    return "gives what its rows give"
