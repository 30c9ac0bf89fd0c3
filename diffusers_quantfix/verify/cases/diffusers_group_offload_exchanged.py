"""A layer of a model is exchanged after its groups were set up, and the model runs on a stream."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    def linear(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.nn.Linear(64, 64).requires_grad_(False)

    def build(device: Any) -> Any:
        block = torch.nn.Sequential(linear(0), linear(1))
        return torch.nn.Sequential(torch.nn.Sequential(block)).to(device)

    def run(model: Any, device: Any) -> Any:
        block = model[0][0]
        block[1] = linear(2).to(block[1].weight.device)
        with torch.no_grad():
            return model(torch.ones(2, 64, device=device)).cpu()

    return group_offload.check(
        build, run, offload_type="block_level", num_blocks_per_group=1, use_stream=True
    )
