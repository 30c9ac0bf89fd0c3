"""diffusers-ip-adapter-quantized: an IP-Adapter cannot be loaded into a quantized UNet."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, lora_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import each_spelling as each_spelling
from tests.rig import models

FIX_ID = "diffusers-ip-adapter-quantized"
SHOWS = r"Casting a quantized model to a new `dtype`|cannot cast a bitsandbytes model in a new `dtype`"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.saved(models.unet(), tmp_path_factory.mktemp("unet"))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("bits", [4, 8])
def test_adapter_is_loaded(gpu, saved, side, bits):
    """All new layers are on the device of the UNet and of its dtype, whatever the file has."""
    import torch

    unet = quantized(saved, bits, side)
    unet._load_ip_adapter_weights([weights(unet)])
    new = [
        parameter for name, parameter in unet.named_parameters() if "_ip." in name or "encoder_hid" in name
    ]
    assert len(new) > 4
    assert {parameter.dtype for parameter in new} == {torch.float16}
    assert {parameter.device for parameter in unet.parameters()} == {unet.device}
    with_image, other_image = (run(unet, gpu.devices[0], seed) for seed in (1, 2))
    assert torch.isfinite(with_image).all()
    assert lora_models.distance(with_image, other_image) > 1e-3


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.parametrize("bits", [0, 4])
def test_offloaded_unet_keeps_its_hooks(gpu, saved, side, bits):
    """Sequential offload: exactly what the UNet gives that was never offloaded."""
    from accelerate import cpu_offload

    runs, here = [], gpu.devices[0]
    for offloaded in (False, True):
        unet = quantized(saved, bits, side) if bits else models.unet().half().to(here)
        if offloaded:
            cpu_offload(unet, spelled(here))
        hooks = [module._hf_hook for module in unet.modules() if hasattr(module, "_hf_hook")]
        unet._load_ip_adapter_weights([weights(unet)])
        after = [module._hf_hook for module in unet.modules() if hasattr(module, "_hf_hook")]
        assert {*map(id, hooks)} <= {*map(id, after)}
        runs.append(run(unet, here, 1))
    assert lora_models.distance(*runs) == 0

    def check(output):
        assert lora_models.distance(output, runs[0]) == 0

    assert_goes_on(lambda: run(unet, here, 1), check)


def quantized(folder, bits: int, side: str):
    """The UNet in 4 or 8 bits on the first device."""
    from diffusers import UNet2DConditionModel

    try:
        return four_bit.load(UNet2DConditionModel, folder, bits=bits)
    except ValueError as error:
        if side == "bare" and "`.to` is not supported for `8-bit`" in str(error):
            pytest.skip("no 8-bit model of diffusers loads here (diffusers-8bit-model-gate)")
        raise


def weights(unet) -> dict:
    """An IP-Adapter for ``models.unet`` in float32, with images of 32 features."""
    import torch

    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return 0.2 * torch.randn(shape, generator=generator)

    adapter = {}
    for number, name in enumerate(unet.attn_processors):
        if name.endswith("attn1.processor"):
            continue
        block, index = name.split(".")[:2]
        channels = unet.config.block_out_channels
        width = {"mid_block": channels[-1]}.get(block)
        if width is None:
            width = (channels if block == "down_blocks" else channels[::-1])[int(index)]
        for part in ("k", "v"):
            adapter[f"{number}.to_{part}_ip.weight"] = random(width, unet.config.cross_attention_dim)
    cross = unet.config.cross_attention_dim
    projection = {
        "proj.weight": random(4 * cross, 32),
        "proj.bias": random(4 * cross),
        "norm.weight": torch.ones(cross),
        "norm.bias": torch.zeros(cross),
    }
    return {"image_proj": projection, "ip_adapter": adapter}


def run(unet, where, seed: int):
    import torch

    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, unet.config.in_channels, 8, 8, generator=generator)
    text = torch.randn(1, 4, unet.config.cross_attention_dim, generator=generator)
    image = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(seed))
    latents, text, image = (tensor.to(where, torch.float16) for tensor in (latents, text, image))
    with torch.no_grad():
        result = unet(
            latents,
            torch.tensor(5, device=where),
            encoder_hidden_states=text,
            added_cond_kwargs={"image_embeds": [image]},
        )
    return result.sample.float().cpu()
