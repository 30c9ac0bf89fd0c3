"""A 4-bit layer and an 8-bit one receive their input by its name, as AnimateDiff of diffusers passes it."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit

    where = four_bit.device()
    layer = four_bit.linear(torch.nn.Linear(64, 64), where)
    given = torch.linspace(-1, 1, 3 * 64).view(3, 64).to(where)
    with torch.no_grad():
        assert torch.equal(layer(input=given), layer(given)), "the output is another one when input is named"
    return "a 4-bit layer gives the same output for layer(input=x) and layer(x)"
