"""A gradient passes through quanto layers that were offloaded in groups after their forward pass."""

from __future__ import annotations

from ..models import group_offload
from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_models

    device = cuda()

    def gradient(model):
        inputs = torch.ones(3, 256, device=device, requires_grad=True)
        model(inputs).sum().backward()
        return inputs.grad

    expected = gradient(quanto_models.layers("qint8").to(device))
    model = quanto_models.layers("qint8").to(device)
    group_offload.apply(model, device)
    assert torch.equal(gradient(model), expected), "the gradient differs"
    return "the gradient of the model that stays on the device"
