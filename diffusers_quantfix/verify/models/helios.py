"""The step of Helios that decodes latents, with a tiny VAE, under a components manager."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def pipeline(manager: Any = None) -> Any:
    """A pipeline of this step alone.

    Args:
        manager: the ``ComponentsManager`` that holds its VAE.
    """
    import torch
    from diffusers import AutoencoderKLWan
    from diffusers.modular_pipelines.helios.decoders import HeliosDecodeStep

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=2,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, 0.2],
        latents_std=[0.5, 0.6],
    )
    pipe = HeliosDecodeStep().init_pipeline(components_manager=manager)
    pipe.update_components(vae=vae.eval())
    return pipe


def video(pipe: Any, device: Any) -> Any:
    """[1, 1, 3, 16, 16] on the CPU, of latents on ``device``."""
    import torch

    latents = torch.linspace(-1, 1, 2 * 2 * 2).reshape(1, 2, 1, 2, 2).to(device)
    said = pipe(latent_chunks=[latents], num_frames=1, output_type="pt", output="videos")
    return torch.as_tensor(said).cpu()
