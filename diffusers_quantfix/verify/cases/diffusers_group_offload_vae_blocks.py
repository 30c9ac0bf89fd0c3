"""The decoder of a VAE is called under block-level group offloading."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import AutoencoderKLQwenImage

    from ..models import group_offload

    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()
    group_offload.by_blocks(vae)
    brought = [name for name, part in vae.named_children() if hasattr(part, "_diffusers_hook")]
    assert "decoder" in brought, "the decoder is onloaded only with the whole VAE, which no pipeline calls"
    with torch.no_grad():
        vae.decode(torch.zeros(1, 4, 1, 4, 4))
    return f"onloaded separately: {', '.join(brought)}"
