"""LEdits++ pipelines with a tiny VAE, which is all that they encode an image with."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIZE = 32


def pipeline(name: str) -> Any:
    """One of class ``name``, on the CPU."""
    import diffusers
    import torch

    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32,),
        down_block_types=("DownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
        layers_per_block=1,
    )
    parts: dict[str, Any] = {
        "vae": diffusers.AutoencoderKL(norm_num_groups=8, block_out_channels=(8,), sample_size=SIZE),
        "unet": unet,
        "scheduler": diffusers.DPMSolverMultistepScheduler(
            algorithm_type="sde-dpmsolver++", solver_order=2, steps_offset=1
        ),
        "text_encoder": None,
        "tokenizer": None,
    }
    if name.endswith("XL"):
        parts |= {"text_encoder_2": None, "tokenizer_2": None}
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return getattr(diffusers, name)(**parts)


def encoded(pipe: Any) -> Any:
    """The latents that the pipeline makes of an image, where they come to be."""
    import torch

    image = torch.linspace(0, 1, 3 * SIZE * SIZE).reshape(1, 3, SIZE, SIZE)
    latents, _resized = pipe.encode_image(image, dtype=torch.float32)
    return latents


def check(name: str) -> str:
    """Whether the image goes where the VAE goes: here to the device meta, which computes nothing."""
    import torch
    from accelerate import cpu_offload_with_hook

    pipe = pipeline(name)
    for model in (pipe.unet, pipe.vae):
        cpu_offload_with_hook(model, torch.device("meta"))
    assert encoded(pipe).is_meta, "the image is encoded elsewhere than on the execution device"
    return "the image goes to the execution device"
