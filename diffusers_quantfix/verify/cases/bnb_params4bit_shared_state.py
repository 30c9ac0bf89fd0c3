"""A parameter of a 4-bit model is copied to the CPU; the model runs again."""

from __future__ import annotations

from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit

    where = cuda()
    layer = four_bit.linear(torch.nn.Linear(128, 128), where)
    inputs = torch.linspace(-1, 1, 128, device=where).view(1, 128)
    with torch.no_grad():
        expected = layer(inputs)
        copies = {name: parameter.to("cpu") for name, parameter in layer.named_parameters()}
        again = layer(inputs)
    assert torch.equal(again, expected), "the output of the layer has changed"
    return f"copied {len(copies)} parameters of a 4-bit layer to the CPU; its output is unchanged"
