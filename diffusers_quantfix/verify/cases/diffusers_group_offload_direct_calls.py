"""The embeddings of a text encoder are called directly under block-level group offloading."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    def build(device: Any) -> Any:
        torch.manual_seed(0)
        return torch.nn.ModuleDict(
            {"embeddings": torch.nn.Embedding(8, 8), "blocks": torch.nn.ModuleList([torch.nn.Linear(8, 8)])}
        ).to(device)

    def run(model: Any, device: Any) -> Any:
        with torch.no_grad():
            return model["embeddings"](torch.arange(4, device=device)).cpu()

    return group_offload.check(build, run, offload_type="block_level", num_blocks_per_group=1)
