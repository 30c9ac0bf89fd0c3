"""A transformer, and a ControlNet with its first layer, under group offloading with streams."""

from __future__ import annotations

from ..models import group_offload
from ..models.devices import cuda


def case(work: str) -> str | None:
    import torch

    device = cuda()
    torch.manual_seed(0)
    shared, one, other = (torch.nn.Linear(8, 8).requires_grad_(False).to(device) for _ in range(3))
    transformer, controlnet = torch.nn.Sequential(shared, one), torch.nn.Sequential(shared, other)
    inputs = torch.randn(2, 8, device=device)
    expected = transformer(controlnet(inputs))
    for model in (transformer.cpu(), controlnet.cpu()):
        group_offload.apply(model, device, use_stream=True)
    for _ in range(2):
        assert torch.equal(transformer(controlnet(inputs)), expected), "the output differs"
    return "both models run; output exact"
