"""Tiny ControlNet-XS: a UNet and its control network in one model."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def unet() -> Any:
    """A ``UNetControlNetXSModel`` of two blocks with random weights, in float32 on the CPU."""
    import torch
    from diffusers import UNetControlNetXSModel

    torch.manual_seed(0)
    return UNetControlNetXSModel(
        sample_size=8,
        block_out_channels=(32, 64),
        ctrl_block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        num_attention_heads=2,
        ctrl_num_attention_heads=2,
        norm_num_groups=8,
        ctrl_max_norm_num_groups=8,
        ctrl_conditioning_embedding_out_channels=(8, 8),
    ).eval()


def pipeline(model: Any) -> Any:
    """A pipeline of this model alone."""
    import diffusers

    names = ("text_encoder", "tokenizer", "controlnet", "safety_checker", "feature_extractor")
    return diffusers.StableDiffusionControlNetXSPipeline(
        **dict.fromkeys(names),
        unet=model,
        vae=diffusers.AutoencoderKL(),
        scheduler=diffusers.DDIMScheduler(),
        requires_safety_checker=False,
    )
