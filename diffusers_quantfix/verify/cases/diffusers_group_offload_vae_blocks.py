"""The decoder of a VAE is called under block-level group offloading."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    import torch
    from diffusers import AutoencoderKLQwenImage
    from diffusers.hooks import apply_group_offloading

    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()
    device = torch.device("cpu")
    try:
        apply_group_offloading(
            vae, onload_device=device, offload_device=device, offload_type="block_level", num_blocks_per_group=1
        )
    except AttributeError:
        if not hasattr(torch, "accelerator") or torch.accelerator.current_accelerator() is not None:
            raise
        # Before 0.42 it asks for the accelerator's type.
        raise CannotReproduce("needs a CUDA device: this diffusers offloads groups to one only") from None
    brought = [name for name, part in vae.named_children() if hasattr(part, "_diffusers_hook")]
    assert "decoder" in brought, "the decoder is brought with the whole VAE only, which no pipeline calls"
    with torch.no_grad():
        vae.decode(torch.zeros(1, 4, 1, 4, 4))
    return f"brought by themselves: {', '.join(brought)}"
