"""A layer is skipped in the second pass under group offloading with a stream."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))
            self.passes = 0

        def forward(self, x):
            self.passes += 1
            for i, layer in enumerate(self.layers):
                x = x if i == 1 and self.passes > 1 else layer(x)
            return x * 0

    def build(device):
        return Model().to(device).eval()

    def run(model, device):
        with torch.no_grad():
            return model(torch.ones(2, 256, device=device)).cpu()

    return group_offload.check(build, run, use_stream=True)
