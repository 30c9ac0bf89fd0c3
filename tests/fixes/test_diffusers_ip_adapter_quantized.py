"""diffusers-ip-adapter-quantized: an IP-Adapter cannot be loaded into a quantized UNet."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import ip_adapter
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
    unet._load_ip_adapter_weights([ip_adapter.of_unet(unet)])
    new = [
        parameter for name, parameter in unet.named_parameters() if "_ip." in name or "encoder_hid" in name
    ]
    assert len(new) > 4
    assert {parameter.dtype for parameter in new} == {torch.float16}
    assert {parameter.device for parameter in unet.parameters()} == {unet.device}
    with_image, other_image = (ip_adapter.run(unet, gpu.devices[0], torch.float16, seed) for seed in (1, 2))
    assert torch.isfinite(with_image).all()
    assert lora_models.distance(with_image, other_image) > 1e-3


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.parametrize("bits", [0, 4])
def test_offloaded_unet_keeps_its_hooks(gpu, saved, side, bits):
    """Sequential offload: exactly what the UNet gives that was never offloaded."""
    import torch
    from accelerate import cpu_offload

    runs, here = [], gpu.devices[0]
    for offloaded in (False, True):
        unet = quantized(saved, bits, side) if bits else models.unet().half().to(here)
        if offloaded:
            cpu_offload(unet, spelled(here))
        hooks = [module._hf_hook for module in unet.modules() if hasattr(module, "_hf_hook")]
        unet._load_ip_adapter_weights([ip_adapter.of_unet(unet)])
        after = [module._hf_hook for module in unet.modules() if hasattr(module, "_hf_hook")]
        assert {*map(id, hooks)} <= {*map(id, after)}
        runs.append(ip_adapter.run(unet, here, torch.float16))
    assert lora_models.distance(*runs) == 0

    def check(output):
        assert lora_models.distance(output, runs[0]) == 0

    assert_goes_on(lambda: ip_adapter.run(unet, here, torch.float16), check)


def quantized(folder, bits: int, side: str):
    """The UNet in 4 or 8 bits on the first device."""
    from diffusers import UNet2DConditionModel

    try:
        return four_bit.load(UNet2DConditionModel, folder, bits=bits)
    except ValueError as error:
        if side == "bare" and "`.to` is not supported for `8-bit`" in str(error):
            pytest.skip("no 8-bit model of diffusers loads here (diffusers-8bit-model-gate)")
        raise
