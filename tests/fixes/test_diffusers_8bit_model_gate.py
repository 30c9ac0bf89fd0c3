"""diffusers-8bit-model-gate: 8-bit models of diffusers refuse to move, and to load with accelerate 1.13."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, eight_bit_models, group_offloaded
from tests.rig import models

FIX_ID = "diffusers-8bit-model-gate"
LOADS = ("diffusers>=0.33", "accelerate>=1.13", "bitsandbytes>=0.48")


@pytest.mark.parametrize("placement", [None, {"": 1}], ids=["", "cuda:1"])
@pytest.mark.defect(FIX_ID, shows="`.to` is not supported for `8-bit`", needs=LOADS)
def test_it_loads(gpu, tmp_path, placement):
    import torch
    from diffusers import FluxTransformer2DModel

    if placement and len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    device = gpu.devices[1 if placement else 0]
    folder = models.saved(models.flux_transformer(), tmp_path)
    model = models.load_quantized(FluxTransformer2DModel, folder, bits=8, device_map=placement)
    eight_bit.assert_whole(model, device)
    whole = models.call_flux(models.flux_pipeline(models.flux_transformer().to(device, torch.float16)))
    latents = models.call_flux(models.flux_pipeline(model))
    assert torch.nn.functional.cosine_similarity(latents.flatten(), whole.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("way", ["to", "cuda"])
@pytest.mark.defect(FIX_ID, shows=eight_bit_models.REFUSED)
def test_it_goes_where_it_is(gpu, tmp_path, side, way):
    model = eight_bit_models.transformer(tmp_path, side)
    assert (model.to(gpu.devices[0]) if way == "to" else model.cuda()) is model
    eight_bit.assert_whole(model, gpu.devices[0])


@pytest.mark.defect(FIX_ID, shows=eight_bit_models.REFUSED)
def test_a_call_without_a_device_moves_nothing(gpu, tmp_path, side):
    import torch

    here = gpu.devices[0]
    model = eight_bit_models.unet(tmp_path, side)
    reference = eight_bit_models.denoise(model, here)
    size = gpu.allocated(here)
    assert model.to(memory_format=torch.channels_last) is model
    assert model.to() is model
    assert gpu.allocated(here) <= size
    assert model.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    eight_bit.assert_whole(model, here)
    _assert_alike(eight_bit_models.denoise(model, here), reference)


@pytest.mark.parametrize("placement", ["sequential", "group"])
def test_a_call_without_a_device_leaves_an_offloaded_model_as_it_is(gpu, tmp_path, side, placement):
    import torch
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    here = gpu.devices[0]
    model = eight_bit_models.unet(tmp_path, side)
    reference = eight_bit_models.denoise(model, here)
    remove_hook_from_module(model, recurse=True)
    if placement == "sequential":
        cpu_offload(model, here, offload_buffers=True)
    else:
        pytest.importorskip("diffusers.hooks.group_offloading", reason="came with diffusers 0.33.0")
        group_offloaded.offload(model, here, group_offloaded.LEAF)
    size = gpu.allocated(here)
    assert model.to(memory_format=torch.channels_last) is model
    assert gpu.allocated(here) <= size
    _assert_alike(eight_bit_models.denoise(model, here), reference)
    _assert_alike(eight_bit_models.denoise(model, here), reference)


def _assert_alike(output, reference) -> None:
    """Convolutions add up in another order with another memory format, and 8-bit layers round what comes of it."""
    import torch

    assert torch.nn.functional.cosine_similarity(output.flatten(), reference.flatten(), dim=0) > 0.999


@pytest.mark.defect("bnb-linear8bit-move", shows="bytes stayed|" + eight_bit_models.REFUSED)
def test_a_move_keeps_its_other_arguments(gpu, tmp_path, side):
    import torch

    model = eight_bit_models.unet(tmp_path, side)
    model.to("cpu", non_blocking=False, memory_format=torch.channels_last)
    eight_bit.assert_gone(gpu, gpu.devices[0])
    eight_bit.assert_whole(model, "cpu")
    assert model.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("there", ["cpu", "cuda:1"])
@pytest.mark.parametrize("first", [False, True], ids=["before forward", "after forward"])
@pytest.mark.defect(
    "bnb-linear8bit-move",
    shows="bytes stayed|companion is on|weight is on|same device|" + eight_bit_models.REFUSED,
)
def test_it_moves_whole(gpu, tmp_path, side, there, first):
    import torch

    here = gpu.devices[0]
    model = eight_bit_models.transformer(tmp_path, side)
    if first or there == "cpu":
        reference = models.call_flux(models.flux_pipeline(model)).cpu()
    if not first:
        model = eight_bit_models.transformer(tmp_path, side)
    size = gpu.allocated(here)
    model.to(there)
    eight_bit.assert_gone(gpu, here)
    eight_bit.assert_whole(model, there)
    if there != "cpu" and first:
        assert torch.equal(models.call_flux(models.flux_pipeline(model)).cpu(), reference)
    model.to(device=here)
    assert gpu.allocated(here) <= size
    eight_bit.assert_whole(model, here)
    if first:
        assert torch.equal(models.call_flux(models.flux_pipeline(model)).cpu(), reference)


def test_a_cast_is_still_refused(gpu, tmp_path, side):
    import torch

    model = eight_bit_models.transformer(tmp_path, side)
    with pytest.raises(ValueError, match=r"[Cc]ast"):
        model.to(torch.float32)
    with pytest.raises(ValueError, match=r"[Cc]ast"):
        model.to("cpu", torch.float32)
