"""transformers-8bit-cuda: 8-bit models of transformers refuse to move."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, eight_bit_models
from tests.rig import models

FIX_ID = "transformers-8bit-cuda"
REFUSED = eight_bit_models.REFUSED


@pytest.mark.defect(FIX_ID, shows=REFUSED)
def test_cuda_where_it_is(gpu, tmp_path):
    model = eight_bit_models.text_encoder(tmp_path)
    assert model.cuda() is model
    assert model.cuda(0) is model
    eight_bit.assert_whole(model, gpu.devices[0])


def spellings(device) -> list:
    """What ``cuda()`` takes for a device: as ``torch.Tensor.cuda`` does."""
    return [((device.index,), {}), ((str(device),), {}), ((device,), {}), ((), {"device": device})]


@pytest.mark.defect(FIX_ID, shows=REFUSED)
@pytest.mark.defect("bnb-linear8bit-move", shows=REFUSED)
def test_every_spelling_of_a_device(gpu, tmp_path):
    there = gpu.devices[-1]
    model = eight_bit_models.text_encoder(tmp_path)
    for args, kwargs in spellings(there):
        model.to("cpu")
        assert model.cuda(*args, **kwargs) is model
        eight_bit.assert_whole(model, there)


@pytest.mark.parametrize("make", [models.clip_text, models.unet])
def test_a_plain_model_takes_what_torch_takes(gpu, make):
    there = gpu.devices[-1]
    model = make()
    for args, kwargs in spellings(there):
        model.to("cpu")
        assert model.cuda(*args, **kwargs) is model
        assert {parameter.device for parameter in model.parameters()} == {there}
    with pytest.raises(TypeError):
        model.cuda(0, 1)


@pytest.mark.parametrize("first", [False, True], ids=["before forward", "after forward"])
@pytest.mark.defect(FIX_ID, shows=REFUSED + "|bytes stayed")
@pytest.mark.defect("bnb-linear8bit-move", shows=REFUSED + "|bytes stayed")
def test_it_moves_whole(gpu, tmp_path, first):
    import torch

    here, there = gpu.devices[0], gpu.devices[-1]
    model = eight_bit_models.text_encoder(tmp_path)
    reference = eight_bit_models.encode(eight_bit_models.text_encoder(tmp_path), here)
    if first:
        eight_bit_models.encode(model, here)
    size = gpu.allocated(here)
    model.to("cpu")
    eight_bit.assert_gone(gpu, here)
    eight_bit.assert_whole(model, "cpu")
    model.cuda(there.index)
    eight_bit.assert_whole(model, there)
    assert torch.equal(eight_bit_models.encode(model, there), reference)
    model.to(here)
    assert gpu.allocated(here) <= size
    assert torch.equal(eight_bit_models.encode(model, here), reference)


def test_a_call_without_a_device_moves_nothing(gpu, tmp_path):
    import torch

    model = eight_bit_models.text_encoder(tmp_path)
    reference = eight_bit_models.encode(model, gpu.devices[0])
    assert model.to(memory_format=torch.channels_last) is model
    eight_bit.assert_whole(model, gpu.devices[0])
    assert torch.equal(eight_bit_models.encode(model, gpu.devices[0]), reference)


def test_a_cast_is_still_refused(gpu, tmp_path):
    import torch

    model = eight_bit_models.text_encoder(tmp_path)
    with pytest.raises(ValueError, match=r"cast|is not supported for"):
        model.to(torch.float32)
