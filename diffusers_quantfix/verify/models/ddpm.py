"""A tiny DDPM pipeline."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def pipeline() -> Any:
    """One on the CPU, without a progress bar."""
    import torch
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(32,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        layers_per_block=1,
        norm_num_groups=8,
    )
    pipe = DDPMPipeline(unet.eval(), DDPMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any) -> Any:
    """[1, 8, 8, 3] on the CPU, of a fixed noise."""
    import torch

    noise = torch.Generator().manual_seed(0)
    return torch.as_tensor(pipe(num_inference_steps=2, generator=noise, output_type="np").images)
