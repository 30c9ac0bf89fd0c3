"""bnb-int8-saved-tiles: an 8-bit model that has run is saved in the layout of its GPU."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, eight_bit_models

FIX_ID = "bnb-int8-saved-tiles"


@pytest.mark.defect(FIX_ID, shows="the weight is saved in another order")
def test_the_state_dict_of_a_layer_that_has_run(gpu):
    assert_saved_in_rows(gpu, "cuda")


def test_the_state_dict_of_a_layer_that_rests_on_the_cpu(gpu):
    assert_saved_in_rows(gpu, "cpu")


def assert_saved_in_rows(gpu, place):
    import torch

    here = gpu.devices[0]
    layer = eight_bit.linear(here)
    before = dict(layer.state_dict())
    before["weight"] = before["weight"].cpu()
    reference = eight_bit.run(layer, here)
    layer.to(place)
    after = layer.state_dict()
    assert after.keys() == before.keys()
    assert torch.equal(after["weight"].cpu(), before["weight"]), "the weight is saved in another order"
    assert after["weight_format"] == before["weight_format"]
    assert torch.equal(eight_bit.run(layer.to(here), here), reference), "saving changed the layer"


@pytest.mark.defect(FIX_ID, shows="memory was taken on the GPU|the weight is saved in another order")
def test_a_shape_that_is_no_multiple_of_a_tile(gpu):
    import torch
    from bitsandbytes.nn import Linear8bitLt

    here = gpu.devices[0]
    torch.manual_seed(0)
    layer = Linear8bitLt(48, 24, has_fp16_weights=False, threshold=6.0).half().to(here)
    before = layer.state_dict()["weight"].cpu()
    with torch.no_grad():
        layer(torch.randn(3, 48).half().to(here))
    held = gpu.allocated(here)
    after = layer.state_dict()
    assert after["weight"].shape == (24, 48), "the weight is saved in another order"
    assert torch.equal(after["weight"].cpu(), before), "the weight is saved in another order"
    assert gpu.allocated(here) <= held, "memory was taken on the GPU"


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.defect(FIX_ID, shows="the output changed", needs=("diffusers>=0.31", "bitsandbytes!=0.48.0"))
def test_a_model_that_has_run(gpu, tmp_path, library):
    """``save_pretrained`` after a forward pass, ``from_pretrained``."""
    eight_bit_models.assert_saved_whole(library, tmp_path, gpu.devices[0])


def test_a_layer_that_has_not_run_and_one_in_16_bits(gpu):
    import torch
    from bitsandbytes.nn import Linear8bitLt

    here = gpu.devices[0]
    layer = eight_bit.linear(here)
    assert layer.state_dict()["weight"].data_ptr() == layer.weight.data_ptr()
    plain = Linear8bitLt(64, 64, has_fp16_weights=True).to(here)
    assert set(plain.state_dict()) == {"weight", "bias"}
    assert torch.equal(plain.state_dict()["weight"], plain.weight)
