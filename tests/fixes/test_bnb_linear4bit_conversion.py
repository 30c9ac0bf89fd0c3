"""bnb-linear4bit-conversion: ``.to("meta")``, ``.to_empty()`` and torch's swap mode break 4-bit layers."""

from __future__ import annotations

import copy
import pickle

import pytest

from tests.fixes import eight_bit
from tests.gate import unmet

FIX_ID = "bnb-linear4bit-conversion"
SHOWS = "a companion is on|Creating a Parameter from an instance of type Params4bit|Couldn't swap|became a Parameter"

double_quant = pytest.mark.parametrize("double", [False, True], ids=["", "double"])


def linear(device, double=False, seed=0):
    """A ``Linear4bit`` [64, 64] in nf4 on ``device``."""
    import torch
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 64, compute_dtype=torch.float16, quant_type="nf4", compress_statistics=double)
    generator = torch.Generator().manual_seed(seed)
    layer.load_state_dict(
        {name: torch.randn(t.shape, generator=generator) for name, t in layer.named_parameters()}
    )
    return layer.half() if device is None else layer.half().to(device)


def stack(device, double=False):
    import torch

    return torch.nn.Sequential(linear(device, double, 1), linear(device, double, 2)).eval()


def assert_whole(model, device) -> None:
    import torch

    device = torch.device(device)
    for layer in model:
        weight, state = layer.weight, layer.weight.quant_state
        assert type(weight).__name__ == "Params4bit", f"the weight became a {type(weight).__name__}"
        assert weight.device == device
        assert layer.quant_state is state
        assert weight.bnb_quantized
        assert weight.module is layer
        if device.type != "meta":
            for tensor in (state.absmax, state.code):
                assert tensor.device == device, f"a companion is on {tensor.device}, not on {device}"


@double_quant
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_meta(gpu, double):
    here = gpu.devices[0]
    model = stack(here, double)
    eight_bit.run(model, here)
    gpu.reset()
    before = gpu.allocated(here)
    model.to("meta")
    assert_whole(model, "meta")
    # bitsandbytes keeps its code tables for each device that it ever quantized on.
    assert gpu.allocated(here) <= max(before - 2 * 2048, 1024 + 64)


@double_quant
@pytest.mark.parametrize("mode", ["swap_module_params", "overwrite_module_params"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_conversion_modes_of_torch(gpu, double, mode):
    import torch

    here, there = gpu.pair
    model = stack(here, double)
    reference = eight_bit.run(stack(here, double), here)
    identities = eight_bit.parameters_of(model)
    with eight_bit.conversion_mode(mode):
        model.to("cpu")
        assert_whole(model, "cpu")
        model.to(there)
        assert_whole(model, there)
        model.to(here)
    assert_whole(model, here)
    if mode == "swap_module_params":
        assert eight_bit.parameters_of(model) == identities
    assert torch.equal(eight_bit.run(model, here), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_quantization_in_swap_mode(gpu):
    import torch

    here = gpu.devices[0]
    reference = eight_bit.run(stack(here), here)
    model = stack(None)
    with eight_bit.conversion_mode("swap_module_params"):
        model.to(here)
    assert_whole(model, here)
    assert torch.equal(eight_bit.run(model, here), reference)


@double_quant
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_to_empty(gpu, double):
    here = gpu.devices[0]
    model = stack(here, double)
    model.to_empty(device="cpu")
    assert_whole(model, "cpu")
    model.to_empty(device=here)
    assert_whole(model, here)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_embedding(gpu):
    import bitsandbytes.nn

    if not hasattr(bitsandbytes.nn, "Embedding4bit"):
        pytest.skip("Embedding4bit came with bitsandbytes 0.44.0")
    layer = bitsandbytes.nn.Embedding4bit(8, 64).to(gpu.devices[0])
    layer.to("meta")
    assert type(layer.weight).__name__ == "Params4bit"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_on_a_machine_without_gpu():
    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"4-bit layers are quantized on the CPU from 0.46 on; {sentence}")
    model = stack("cpu")
    model.to("meta")
    assert_whole(model, "meta")


def test_ordinary_moves_copies_and_pickles_are_upstreams(gpu):
    import torch

    here, there = gpu.pair
    model = stack(here)
    reference = eight_bit.run(model, here)
    identities = eight_bit.parameters_of(model)
    assert torch.equal(eight_bit.run(model.to(there), there), reference)
    assert eight_bit.parameters_of(model) == identities
    assert torch.equal(eight_bit.run(copy.deepcopy(model), there), reference)
    pickle.loads(pickle.dumps(model.to("cpu")))
