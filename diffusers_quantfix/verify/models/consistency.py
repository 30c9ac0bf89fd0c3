"""A tiny consistency decoder."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def decoder() -> Any:
    """A ``ConsistencyDecoderVAE`` of two levels with random weights, in float32 on the CPU."""
    import torch
    from diffusers import ConsistencyDecoderVAE

    torch.manual_seed(0)
    return ConsistencyDecoderVAE(
        encoder_block_out_channels=(16, 16), encoder_norm_num_groups=4, encoder_layers_per_block=1,
        encoder_down_block_types=("DownEncoderBlock2D",) * 2, decoder_block_out_channels=(16, 16),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2, decoder_layers_per_block=1,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2, decoder_norm_num_groups=4,
    ).eval()  # fmt: skip


def run(model: Any, device: Any) -> Any:
    """The latents of a fixed image, and the image that they give, flat, on the CPU."""
    import torch

    made = torch.Generator().manual_seed(1)
    image = torch.randn(1, 3, 16, 16, generator=made).to(device)
    with torch.no_grad():
        latents = model.encode(image).latent_dist.mode()
        decoded = model.decode(latents, generator=made).sample
    model.decoder_scheduler = type(
        model.decoder_scheduler
    )()  # which keeps tables on the device, offloaded or not
    return torch.cat([latents.flatten(), decoded.flatten()]).cpu()
