"""diffusers-8bit-hooks-follow: after a move, hooks send the inputs of an 8-bit model to its old device."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models.hooked import execution_devices
from tests.fixes import eight_bit, eight_bit_models
from tests.rig import models

FIX_ID = "diffusers-8bit-hooks-follow"


@pytest.mark.defect(
    "bnb-linear8bit-move", shows="same device|same GPU|companion is on|" + eight_bit_models.REFUSED
)
@pytest.mark.defect(FIX_ID, shows="same device|same GPU|companion is on")
def test_a_moved_model_runs_where_it_is(gpu, tmp_path, side):
    import torch

    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    here, there = gpu.devices[:2]
    model = eight_bit_models.transformer(tmp_path, side)
    reference = models.call_flux(models.flux_pipeline(model), device=here).cpu()
    for device in (there, here, there):
        model.to(device)
        eight_bit.assert_whole(model, device)
        assert torch.equal(models.call_flux(models.flux_pipeline(model), device=device).cpu(), reference)
    eight_bit.assert_gone(gpu, here)


@pytest.mark.defect(FIX_ID, shows="execution device")
def test_every_hook_follows(gpu, tmp_path, side):
    """Also where the layers would not come along: the hooks are what this is about."""
    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    model = eight_bit_models.transformer(tmp_path, side)
    try:
        model.to("cuda:1")
    except ValueError:
        pytest.skip("the model refuses to move here (diffusers-8bit-model-gate)")
    found = set(execution_devices(model).values())
    assert found <= {"cuda:1"}, f"an execution device is left: {found}"
