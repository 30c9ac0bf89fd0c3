"""A block with a large buffer is offloaded with a stream."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(256))
            self.register_buffer("scale", torch.ones(256, 256))

        def forward(self, x):
            return x @ self.scale + self.bias

    def build(device):
        return torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(256, 256), Scaled())).to(device)

    def run(model, device):
        with torch.no_grad():
            return model(torch.ones(4, 256, device=device)).cpu()

    def seeded(device):
        torch.manual_seed(0)
        return build(device)

    return group_offload.check(
        seeded, run, offload_type="block_level", num_blocks_per_group=1, use_stream=True
    )
