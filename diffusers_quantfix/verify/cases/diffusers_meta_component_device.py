"""An image is sent to ``vae.device`` of an offloaded VAE, as StableDiffusionGLIGENPipeline does."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload
    from diffusers import AutoencoderKL

    from ..models.vae import vae

    vae().save_pretrained(work)
    torch.manual_seed(0)
    image = torch.rand(1, 3, 32, 32) * 2 - 1

    def encode(model):
        with torch.no_grad():
            return model.encode(image.to(model.device)).latent_dist.mode()

    reference = encode(AutoencoderKL.from_pretrained(work))
    model = AutoencoderKL.from_pretrained(work)
    cpu_offload(model, torch.device("cpu"))
    error = (encode(model) - reference).abs().max().item()
    assert error == 0, f"maximum error of the latents of the offloaded VAE: {error:.3g}"
    return f"the device of the offloaded VAE is {model.device}, where it runs; latents exact"
