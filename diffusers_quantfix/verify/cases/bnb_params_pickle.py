"""A 4-bit layer is saved whole and loaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch

    from ..models import four_bit

    layer = four_bit.linear(torch.nn.Linear(128, 128), four_bit.device())
    path = os.path.join(work, "layer.pt")
    torch.save(layer, path)
    kind = type(torch.load(path, weights_only=False).weight).__name__
    assert kind == "Params4bit", f"the weight became a {kind}"
    return "after saving and loading the weight is still a Params4bit"
