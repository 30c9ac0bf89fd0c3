"""The tiny UNet of the cases and tests."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def unet(seed: int = 0, **config: Any) -> Any:
    """A random UNet2DConditionModel with two levels, the lower one with cross attention, float32 on the CPU."""
    import torch
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    defaults = {
        "sample_size": 8,
        "block_out_channels": (64, 128),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 2,
        "cross_attention_dim": 64,
    }
    return UNet2DConditionModel(**{**defaults, **config}).eval()
