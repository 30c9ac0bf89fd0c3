"""A prior under group offloading, whose latents are scaled after the last pass."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload, prior

    def run(model: Any, device: Any) -> Any:
        return prior.scaled(model, device).cpu()

    def build(device: Any) -> Any:
        return prior.tiny().to(device)

    with torch.no_grad():
        return group_offload.check(build, run)
