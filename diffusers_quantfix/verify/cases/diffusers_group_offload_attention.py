"""torch's MultiheadAttention under leaf-level group offloading."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    def build(device: Any) -> Any:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
        return torch.nn.Sequential(layer).eval().requires_grad_(False).to(device)

    def run(model: Any, device: Any) -> Any:
        inputs = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
        # with gradients, since the layer's fast path calls no submodule
        return model(inputs.to(device).requires_grad_()).detach().cpu()

    return group_offload.check(build, run)
