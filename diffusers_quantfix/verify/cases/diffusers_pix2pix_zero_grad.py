"""The UNet of Pix2Pix Zero has 4-bit layers."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import torch
    from bitsandbytes.nn import Linear4bit
    from diffusers.models.attention_processor import Attention
    from diffusers.pipelines.deprecated.stable_diffusion_variants import (
        pipeline_stable_diffusion_pix2pix_zero as zero,
    )

    class Unet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn2 = Attention(64, heads=2, dim_head=32)
            self.attn2.to_q = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
            self.attn_processors = {"attn2.processor": None}

        def set_attn_processor(self, processors: dict[str, Any]) -> None:
            self.attn2.set_processor(processors["attn2.processor"])

    from ..models import four_bit

    unet = Unet().to(four_bit.device())
    zero.prepare_unet(unet)
    assert unet.attn2.to_k.weight.requires_grad
    return "runs; plain weights have gradients as before"
