"""An image is sent to ``vae.device`` of an offloaded VAE, as StableDiffusionGLIGENPipeline does."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    ).save_pretrained(work)
    image = torch.rand(1, 3, 32, 32) * 2 - 1

    def encode(vae):
        with torch.no_grad():
            return vae.encode(image.to(vae.device)).latent_dist.mode()

    reference = encode(AutoencoderKL.from_pretrained(work))
    vae = AutoencoderKL.from_pretrained(work)
    cpu_offload(vae, torch.device("cpu"))
    error = (encode(vae) - reference).abs().max().item()
    assert error == 0, f"maximum error of the latents of the offloaded VAE: {error:.3g}"
    return f"the device of the offloaded VAE is {vae.device}, where it runs; latents exact"
