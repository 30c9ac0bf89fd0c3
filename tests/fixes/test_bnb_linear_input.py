"""bnb-linear-input: quantized layers refuse their input as a keyword."""

from __future__ import annotations

import pickle

import pytest

from tests.fixes import eight_bit, four_bit

FIX_ID = "bnb-linear-input"
SHOWS = r"TypeError: Linear(4bit|8bitLt)\.forward\(\) got an unexpected keyword argument 'input'"


@pytest.mark.parametrize("kind", [four_bit, eight_bit], ids=["4-bit", "8-bit"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_layer_takes_its_input_by_name(gpu, kind):
    """As ``torch.nn.Linear`` does, whose place it takes; AnimateDiff of diffusers calls it so."""
    import torch

    layer, given = kind.linear(gpu.devices[0]), kind.batch(gpu.devices[0])
    with torch.no_grad():
        assert torch.equal(layer(input=given), layer(given))


def test_the_name_that_bitsandbytes_gives_it(gpu):
    import torch

    layer, given = four_bit.linear(gpu.devices[0]), four_bit.batch(gpu.devices[0])
    with torch.no_grad():
        assert torch.equal(layer(x=given), layer(given))


def test_it_is_a_plain_function():
    """It can be pickled with its layer, and is what torch.compile sees."""
    from types import FunctionType

    from bitsandbytes import nn

    assert type(nn.Linear4bit.forward) is FunctionType
    assert pickle.loads(pickle.dumps(nn.Linear4bit)) is nn.Linear4bit
