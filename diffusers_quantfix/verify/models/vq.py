"""A tiny VQModel, and a tiny transformer of VQ Diffusion."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def autoencoder(**options: Any) -> Any:
    """A ``VQModel`` of two levels with random weights and a codebook of 16, in float32 on the CPU."""
    import torch
    from diffusers import VQModel

    torch.manual_seed(0)
    return VQModel(
        block_out_channels=(32, 32), norm_num_groups=4, latent_channels=4, num_vq_embeddings=16, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **options,
    ).eval()  # fmt: skip


def run(model: Any, device: Any) -> Any:
    """The latents of a fixed image, and what each way to decode them gives, flat, on the CPU."""
    import torch

    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        latents = model.encode(images).latents
        outputs = [latents, model.decode(latents).sample, model(images).sample]
        if model.config.lookup_from_codebook:
            tokens = torch.arange(64, device=device) % 16
            outputs.append(model.decode(tokens, force_not_quantize=True, shape=(1, 8, 8, 4)).sample)
        else:
            outputs.append(model.decode(latents, force_not_quantize=True).sample)
    return torch.cat([output.flatten() for output in outputs]).cpu()


def transformer() -> Any:
    """A ``Transformer2DModel`` of one layer for 16 tokens of 6 kinds with random weights, in float32 on the CPU."""
    import torch
    from diffusers import Transformer2DModel

    torch.manual_seed(0)
    return Transformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, cross_attention_dim=16, norm_num_groups=2,
        sample_size=4, num_vector_embeds=6, num_embeds_ada_norm=10, norm_type="ada_norm",
    ).eval()  # fmt: skip


def predict(model: Any) -> Any:
    """What the transformer makes of fixed tokens and a fixed text."""
    import torch

    text = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(torch.arange(16)[None] % 6, encoder_hidden_states=text, timestep=torch.tensor(3)).sample
