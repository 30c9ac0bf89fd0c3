"""A graph keeps the weight of a norm under group offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    def build(device):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256)).to(device)

    def run(model, device):
        x = torch.linspace(-1, 1, 512, device=device).reshape(2, 256).requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), [x])[0].cpu()

    return group_offload.check(build, run)
