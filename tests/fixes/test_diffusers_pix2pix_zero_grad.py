"""diffusers-pix2pix-zero-grad: Pix2Pix Zero with a quantized UNet, and under group offload."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models.unet import unet as tiny_unet
from tests.fixes import four_bit
from tests.fixes.group_offloaded import BLOCK, LEAF, STREAM, offload
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-pix2pix-zero-grad"
SHOWS = r"only Tensors of floating point( and complex)? dtype can require gradients"

torch = pytest.importorskip("torch")


def pipeline(unet):
    from diffusers import DDIMInverseScheduler, DDIMScheduler, StableDiffusionPix2PixZeroPipeline

    pipe = StableDiffusionPix2PixZeroPipeline(
        vae=models.vae(latent_channels=4),
        text_encoder=models.clip_text(),
        tokenizer=models.tokenizer(),
        unet=unet,
        scheduler=DDIMScheduler(),
        feature_extractor=None,
        safety_checker=None,
        inverse_scheduler=DDIMInverseScheduler(),
        caption_generator=None,
        caption_processor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe, device, guidance: float = 0.1):
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randn(1, 77, 64, generator=generator) for _ in range(2))
    for part in (pipe.vae, pipe.text_encoder):
        part.to(device)
    return pipe(
        "w1 w2",
        source_embeds=source.to(device),
        target_embeds=target.to(device),
        num_inference_steps=2,
        height=16,
        width=16,
        cross_attention_guidance_amount=guidance,
        generator=generator,
        output_type="latent",
    ).images.cpu()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_quantized_unet(gpu, tmp_path, bits):
    plain, device = tiny_unet(), gpu.devices[0]
    unet = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits, dtype=torch.float32)
    if bits == 4:
        unet.to(device)
    expected, out = run(pipeline(plain), "cpu"), run(pipeline(unet), device)
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < 0.3, f"the output differs by {error:.0%}"
    assert not torch.equal(run(pipeline(unet), device, guidance=5.0), out), "the gradient has no effect"


def test_plain_weights_require_gradients_as_before():
    unet = tiny_unet()
    unet.requires_grad_(False)
    run(pipeline(unet), "cpu")
    required = {name for name, weight in unet.named_parameters() if weight.requires_grad}
    assert required == {name for name, _ in unet.named_parameters() if ".attn2." in name}


@pytest.mark.parametrize("mode", [LEAF, BLOCK | STREAM], ids=["leaf", "block-stream"])
@pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="group offloading came with 0.33")
# Its backward pass also needs diffusers-group-offload-backward, which does nothing before torch 2.8.
@pytest.mark.defect(FIX_ID, shows="on the same device", needs="torch>=2.8")
def test_group_offload(gpu, mode):
    device = gpu.devices[0]
    expected = run(pipeline(tiny_unet().to(device)), device)
    pipe = pipeline(tiny_unet())
    offload(pipe.unet, device, mode)
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)


@pytest.mark.defect(FIX_ID, shows="has a gradient")
def test_no_gradients_of_weights_are_left(gpu):
    unet = tiny_unet().to(gpu.devices[0])
    run(pipeline(unet), gpu.devices[0])
    for name, weight in unet.named_parameters():
        assert weight.grad is None, f"{name} has a gradient"
