"""A tiny DiT."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def transformer() -> Any:
    """A ``DiTTransformer2DModel`` of three blocks with random weights, in float32 on the CPU."""
    import torch
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=3, sample_size=8,
        num_embeds_ada_norm=10, norm_num_groups=4,
    ).eval()  # fmt: skip


def run(model: Any, device: Any) -> Any:
    """The prediction for fixed inputs: [2, 8, 8, 8] on the CPU."""
    import torch

    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(device, model.dtype)
    time, labels = torch.tensor([3, 7], device=device), torch.tensor([1, 4], device=device)
    with torch.no_grad():
        return model(latents, time, class_labels=labels).sample.cpu()
