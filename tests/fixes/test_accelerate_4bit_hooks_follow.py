"""accelerate-4bit-hooks-follow: after a move, hooks send the inputs of a 4-bit model to its old device."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models.hooked import execution_devices
from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

FIX_ID = "accelerate-4bit-hooks-follow"
SHOWS = "same device|same GPU"
MOVABLE = "transformers>=4.45"  # before, it refuses to move a 4-bit model


def _text_encoder(folder):
    plain = models.clip_text()
    return four_bit.load(type(plain), models.saved(plain, folder), device_map={"": 0})


def _encode(model, device):
    import torch

    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3]], device=device)).last_hidden_state


@pytest.mark.defect("bnb-quant-state-code", shows="quant_state.code is on", needs=MOVABLE)
@pytest.mark.defect(FIX_ID, shows=SHOWS + "|is on cuda:0", needs=MOVABLE)
def test_a_moved_text_encoder_runs_where_it_is(gpu, tmp_path):
    import torch

    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    here, there = gpu.devices[:2]
    model = _text_encoder(tmp_path)
    reference = _encode(model, here).cpu()
    for device in (there, here, there):
        model.to(device)
        four_bit.assert_whole(model, device)
        output = _encode(model, device)
        assert output.device == device
        assert torch.equal(output.cpu(), reference)


@pytest.mark.defect("bnb-quant-state-code", shows="quant_state.code is on", needs=MOVABLE)
@pytest.mark.defect(FIX_ID, shows="same device|same GPU|sequential model offloading", needs=MOVABLE)
def test_a_pipeline_goes_to_the_other_device(gpu, tmp_path):
    """There its inputs may be on the CPU, as they may be where it was loaded: programs for these releases do that."""
    import torch

    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    here, there = gpu.devices[:2]
    model = _text_encoder(tmp_path)
    inputs = ["cpu"] if hasattr(model, "_hf_hook") else []
    reference = _encode(model, here).cpu()
    pipe = models.flux_pipeline(text_encoder=model)
    for device in (there, here):
        pipe.to(device)
        four_bit.assert_whole(model, device)
        for place in (device, *inputs):
            assert torch.equal(_encode(model, place).cpu(), reference)


@pytest.mark.defect(FIX_ID, shows="execution device", needs=MOVABLE)
def test_every_hook_follows(gpu, tmp_path):
    model = _text_encoder(tmp_path)
    for move, device in ((lambda: model.to("cpu"), "cpu"), (model.cuda, "cuda:0")):
        move()
        found = {*execution_devices(model).values()}
        assert found <= {device}, f"an execution device is left: {found}"


def test_removed_hooks_leave_nothing(gpu, tmp_path):
    """accelerate takes back what ``dispatch_model`` put over the model's own methods."""
    from accelerate.hooks import remove_hook_from_submodules

    model = _text_encoder(tmp_path)
    remove_hook_from_submodules(model)
    assert not {"to", "cuda"} & vars(model).keys()


@pytest.mark.skipif(bool(unmet(MOVABLE)), reason="before, transformers refuses to move a 4-bit model")
def test_a_spread_model_keeps_its_hooks(gpu, tmp_path):
    """It cannot be moved as a whole."""
    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    plain = models.t5_encoder()
    spread = {"shared": 0, "encoder.embed_tokens": 0, "encoder.block": 1, "encoder.final_layer_norm": 1}
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), device_map=spread)
    before = execution_devices(model)
    model.to(gpu.devices[0])
    assert execution_devices(model) == before
