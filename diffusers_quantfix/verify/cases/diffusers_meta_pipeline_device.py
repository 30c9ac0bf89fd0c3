"""Noise is sent to ``pipe.device`` of an offloaded pipeline, as pipelines and users do."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload
    from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )
    DDIMPipeline(unet, DDIMScheduler()).save_pretrained(work)
    noise = torch.randn(1, 3, 8, 8)

    def predict(pipe):
        with torch.no_grad():
            return pipe.unet(noise.to(pipe.device), 10).sample

    reference = predict(DDIMPipeline.from_pretrained(work))
    pipe = DDIMPipeline.from_pretrained(work)
    cpu_offload(pipe.unet, torch.device("cpu"))
    error = (predict(pipe) - reference).abs().max().item()
    assert error == 0, f"maximum error of the offloaded UNet: {error:.3g}"
    return f"the device of the offloaded pipeline is {pipe.device}, where it runs; output exact"
