"""bnb-int8-prequantized: a checkpoint that was saved in 8 bits runs as noise."""

from __future__ import annotations

import copy

import pytest

from tests.fixes import eight_bit, eight_bit_models
from tests.gate import unmet

FIX_ID = "bnb-int8-prequantized"


@pytest.mark.parametrize("call", ["to", "cuda"])
@pytest.mark.defect(FIX_ID, shows="'NoneType' object has no attribute 'data_ptr'")
def test_a_parameter_of_a_checkpoint_knows_that_it_is_quantized(gpu, call):
    import bitsandbytes.nn
    import torch

    here = gpu.devices[0]
    data = torch.randint(-127, 128, (256, 256), dtype=torch.int8)
    weight = getattr(bitsandbytes.nn.Int8Params(data, requires_grad=False), call)(here)
    assert weight.CB.data_ptr() == weight.data_ptr()


@pytest.mark.defect(FIX_ID, shows="the output changed|int8|Char", needs="bitsandbytes>=0.45")
def test_a_layer_of_a_checkpoint(gpu):
    import torch

    here = gpu.devices[0]
    layer = eight_bit.linear(here)
    twin = copy.deepcopy(layer)
    data, scales = layer.weight.data.cpu(), layer.weight.SCB.clone()
    reference = eight_bit.run(layer, here)
    twin.weight = type(twin.weight)(data, requires_grad=False).to(here)
    twin.weight.SCB = scales
    assert torch.equal(eight_bit.run(twin, here), reference), "the output changed"


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.defect(FIX_ID, shows="the output changed", needs=("bitsandbytes>=0.45", "diffusers>=0.31"))
def test_a_model_that_was_saved(gpu, tmp_path, library):
    """``save_pretrained`` in 8 bits, ``from_pretrained``."""
    eight_bit_models.assert_saved_whole(library, tmp_path, gpu.devices[0])


def test_the_other_moves_stay(gpu):
    import torch

    if sentence := unmet("bitsandbytes>=0.45"):
        pytest.skip(f"the rig computes 8-bit layers as bitsandbytes 0.45 and later do; {sentence}")
    here, there = gpu.pair
    layer = eight_bit.linear(here)
    reference = eight_bit.run(layer, here)
    for place in ("cpu", there, here):
        layer.to(place)
        assert layer.weight.device == torch.device(place)
    assert torch.equal(eight_bit.run(layer, here), reference)
