"""Two modules that share a parameter, of which the second is called, under leaf-level group offloading."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    class Table(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, ids):
            return self.weight[ids]

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = Table(torch.nn.Parameter(torch.randn(64, 256)))
            self.embed_tokens = Table(self.shared.weight)
            self.layer = torch.nn.Linear(256, 256)

        def forward(self, ids):
            return self.layer(self.embed_tokens(ids))

    def build(device):
        torch.manual_seed(0)
        return Encoder().to(device).eval()

    def run(model, device):
        with torch.no_grad():
            return model(torch.arange(8, device=device)).cpu()

    return group_offload.check(build, run)
