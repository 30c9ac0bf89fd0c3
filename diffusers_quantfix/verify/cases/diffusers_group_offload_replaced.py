"""A weight of a model under group offloading with a stream gets other data between two passes."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    def build(device):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)

    def run(model, device):
        inputs = torch.ones(2, 64, device=device)
        with torch.no_grad():
            model(inputs)
            model[1].weight.data = torch.ones_like(model[1].weight)
            return model(inputs).cpu()

    return group_offload.check(build, run, use_stream=True)
