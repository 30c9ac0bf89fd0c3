"""bnb-linear8bit-move: a parent's ``.to()`` leaves the companions of an 8-bit weight behind."""

from __future__ import annotations

import copy
import pickle

import pytest

from tests.fixes import eight_bit
from tests.gate import ONE_GRAPH, unmet

FIX_ID = "bnb-linear8bit-move"
STAYED = "bytes stayed on cuda"
NO_PARAMETER = (
    "Creating a Parameter from an instance of type Int8Params|Couldn't swap|the weight became a Parameter"
)

forward = pytest.mark.parametrize("first", [False, True], ids=["before forward", "after forward"])


@forward
@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_a_parent_moves_everything_away(gpu, first):
    here = gpu.devices[0]
    model = eight_bit.stack(here)
    if first:
        eight_bit.run(model, here)
    model.to("cpu")
    eight_bit.assert_gone(gpu, here)
    eight_bit.assert_whole(model, "cpu")


@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_the_layer_itself_moves_everything_away(gpu):
    """After the first forward upstream's own ``Linear8bitLt.to`` (0.48.0) is right; before it is not."""
    here = gpu.devices[0]
    layer = eight_bit.linear(here)
    layer.to("cpu")
    eight_bit.assert_gone(gpu, here)
    eight_bit.assert_whole(layer, "cpu")


@forward
@pytest.mark.parametrize("way", ["cpu", "cuda:1", "half"])
@pytest.mark.defect(
    FIX_ID, shows=r"bytes stayed on cuda|the output changed|same device|same GPU|memory:|companion is on"
)
def test_there_and_back_is_bit_equal_and_costs_nothing(gpu, first, way):
    import torch

    here, there = gpu.pair
    reference = eight_bit.run(eight_bit.stack(here), here)
    model = eight_bit.stack(here)
    if first:
        eight_bit.run(model, here)
    before, identities = gpu.allocated(here), eight_bit.parameters_of(model)
    if way == "half":
        model.to(there).half()
    else:
        model.to("cpu" if way == "cpu" else there)
    model.to(here)
    assert eight_bit.parameters_of(model) == identities
    assert gpu.allocated(here) == before, f"memory: {gpu.allocated(here)} bytes instead of {before}"
    eight_bit.assert_whole(model, here)
    assert torch.equal(eight_bit.run(model, here), reference), "the output changed"


@forward
@pytest.mark.defect(FIX_ID, shows=r"same device|same GPU|companion is on|the output changed")
def test_it_runs_on_the_other_device(gpu, first):
    import torch

    here, there = gpu.devices[0], gpu.devices[-1]
    if here == there:
        pytest.skip("needs two CUDA devices")
    model = eight_bit.stack(here)
    reference = eight_bit.run(eight_bit.stack(here), here)
    if first:
        eight_bit.run(model, here)
    model.to(there)
    assert torch.equal(eight_bit.run(model, there), reference), "the output changed"
    eight_bit.assert_gone(gpu, here)


@forward
@pytest.mark.parametrize("call", ["cuda", "cpu"])
@pytest.mark.defect(FIX_ID, shows=r"bytes stayed on cuda|companion is on|CB is a second copy|output changed")
def test_cuda_and_cpu_move_as_well(gpu, first, call):
    import torch

    here = gpu.devices[0]
    model = eight_bit.stack(here)
    reference = eight_bit.run(eight_bit.stack(here), here)
    if first:
        eight_bit.run(model, here)
    model.cpu()
    eight_bit.assert_gone(gpu, here)
    if call == "cuda":
        model.cuda()
        eight_bit.assert_whole(model, here)
        assert torch.equal(eight_bit.run(model, here), reference), "the output changed"


@forward
@pytest.mark.defect(FIX_ID, shows=NO_PARAMETER)
def test_meta(gpu, first):
    here = gpu.devices[0]
    model = eight_bit.stack(here)
    if first:
        eight_bit.run(model, here)
    model.to("meta")
    eight_bit.assert_gone(gpu, here)
    eight_bit.assert_whole(model, "meta")


@forward
@pytest.mark.defect(FIX_ID, shows=NO_PARAMETER + "|second copy|stayed")
def test_to_empty_then_load(gpu, first):
    """From meta, as a loader does it, and straight from the device."""
    import torch

    here = gpu.devices[0]
    source = eight_bit.stack(here)
    state = copy.deepcopy(source.state_dict())  # weight_format is a str in 0.43.0
    reference = eight_bit.run(source, here)
    for model in (eight_bit.stack(here).to("meta"), eight_bit.stack(here)):
        if first and model[0].weight.device == here:
            eight_bit.run(model, here)
        model.to_empty(device=here)
        eight_bit.assert_whole(model, here)
        if not first:  # after a forward pass loading is another defect (bnb-int8-reload)
            model.load_state_dict(state)
            assert torch.equal(eight_bit.run(model, here), reference)


@forward
@pytest.mark.parametrize("mode", ["swap_module_params", "overwrite_module_params"])
@pytest.mark.defect(FIX_ID, shows=NO_PARAMETER)
def test_conversion_modes_of_torch(gpu, first, mode):
    import torch

    here = gpu.devices[0]
    model = eight_bit.stack(here)
    reference = eight_bit.run(eight_bit.stack(here), here)
    if first:
        eight_bit.run(model, here)
    identities = eight_bit.parameters_of(model)
    with eight_bit.conversion_mode(mode):
        model.to("cpu")
        eight_bit.assert_gone(gpu, here)
        model.to(here)
        eight_bit.assert_whole(model, here)
    if mode == "swap_module_params":
        assert eight_bit.parameters_of(model) == identities
    assert torch.equal(eight_bit.run(model, here), reference)


@pytest.mark.defect(FIX_ID, shows=NO_PARAMETER)
def test_meta_on_a_machine_without_gpu():
    eight_bit.skip_without_cpu_kernels()
    model = eight_bit.stack("cpu").to("meta")
    eight_bit.assert_whole(model, "meta")


@forward
@pytest.mark.defect(FIX_ID, shows=r"same device|same GPU|bytes stayed")
def test_embedding(gpu, first):
    import bitsandbytes.nn
    import torch

    if not hasattr(bitsandbytes.nn, "Embedding8bit"):
        pytest.skip("Embedding8bit came with bitsandbytes 0.44.0")
    here, there = gpu.pair
    layer = bitsandbytes.nn.Embedding8bit(8, eight_bit.FEATURES, dtype=torch.float16).to(here)
    ids = torch.tensor([1, 5, 1])
    reference = layer(ids.to(here)).cpu()
    if not first:
        layer = copy.deepcopy(layer)
    model = torch.nn.Sequential(layer).to(there)
    assert torch.equal(model(ids.to(there)).cpu(), reference)
    model.to("cpu")
    assert torch.equal(model(ids), reference)
    del layer
    eight_bit.assert_gone(gpu, here)


@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_weights_in_16_bits_that_are_quantized_for_every_pass(gpu):
    """``has_fp16_weights=True``: the state has a quantized copy of the weight, a real second matrix."""
    import torch
    from bitsandbytes.nn import Linear8bitLt

    if unmet("bitsandbytes<0.45") and unmet("bitsandbytes>=0.46"):
        pytest.skip("the rig has no stand-in for the kernel of bitsandbytes 0.45 that quantizes by columns")
    here, there = gpu.pair
    torch.manual_seed(0)
    layer = Linear8bitLt(64, 64, has_fp16_weights=True).half()
    model = torch.nn.Sequential(layer).to(here).eval()
    reference = eight_bit.run(model, here)
    model.to("cpu")
    eight_bit.assert_gone(gpu, here)
    model.to(there)
    assert layer.weight.dtype == torch.float16
    if there.type == "cuda":
        assert torch.equal(eight_bit.run(model, there), reference)


# ---- deeper, with the package only


def test_quantization_on_the_way_to_the_gpu_is_upstreams(gpu):
    """A weight in 16 bits that moves for the first time is quantized, once, and its copy is given up."""
    import torch

    here = gpu.devices[0]
    model = eight_bit.stack(here)
    weight = model[0].weight
    assert weight.dtype == torch.int8
    assert weight.CB.data_ptr() == weight.data_ptr()
    assert gpu.allocated(here) == sum(
        tensor.nbytes
        for tensor in (*model.parameters(), *(layer.weight.SCB for layer in eight_bit.layers_of(model)))
    )


@forward
def test_the_scales_are_never_cast(gpu, first):
    import torch

    here, there = gpu.pair
    model = eight_bit.stack(here)
    if first:
        eight_bit.run(model, here)
    for cast in (lambda: model.half(), lambda: model.to(there, torch.bfloat16), lambda: model.double()):
        cast()
        for layer in eight_bit.layers_of(model):
            scales = layer.state.SCB if first else layer.weight.SCB
            assert scales.dtype == torch.float32
            assert layer.weight.dtype == torch.int8


@forward
def test_nothing_moves_where_nothing_has_to(gpu, first):
    here = gpu.devices[0]
    model = eight_bit.stack(here)
    if first:
        eight_bit.run(model, here)
    gpu.reset()
    before = gpu.allocated(here)
    model.to(here)
    model.half()
    traffic = gpu.traffic()
    assert (traffic.h2d, traffic.d2h, traffic.d2d) == (0, 0, 0)
    assert gpu.peak(here) == before


@forward
def test_one_trip_costs_each_byte_once(gpu, first):
    here = gpu.devices[0]
    model = eight_bit.stack(here)
    if first:
        eight_bit.run(model, here)
    size = gpu.allocated(here)
    gpu.reset()
    model.to("cpu")
    model.to(here)
    traffic = gpu.traffic()
    assert (traffic.h2d, traffic.d2h, traffic.d2d) == (size, size, 0)
    assert gpu.peak(here) == size


def test_a_weight_shared_by_two_layers_stays_shared(gpu):
    here = gpu.devices[0]
    model = eight_bit.stack(here)
    model[2].weight = model[0].weight
    model.to("cpu")
    eight_bit.assert_gone(gpu, here)
    model.to(here)
    assert model[2].weight is model[0].weight
    eight_bit.assert_whole(model, here)


def test_a_copy_left_behind_by_others_is_fixed(gpu):
    """A layer that was moved before the package was there: the next move brings it together."""
    here = gpu.devices[0]
    model = eight_bit.stack(here)
    for layer in eight_bit.layers_of(model):
        layer.weight.data = layer.weight.data.cpu()
    model.to("cpu")
    eight_bit.assert_gone(gpu, here)
    eight_bit.assert_whole(model, "cpu")


@forward
def test_gradients_of_16_bit_weights_move(gpu, first):
    import torch
    from bitsandbytes.nn import Linear8bitLt

    here = gpu.devices[0]
    layer = Linear8bitLt(64, 64, has_fp16_weights=True).half().to(here)
    layer.weight.grad = torch.ones_like(layer.weight)
    with eight_bit.conversion_mode("swap_module_params" if first else "overwrite_module_params"):
        layer.to("cpu")
    assert type(layer.weight).__name__ == "Int8Params"
    assert layer.weight.grad.device.type == "cpu"
    eight_bit.assert_gone(gpu, here)


@forward
def test_copies_and_pickles(gpu, first):
    import torch

    here = gpu.devices[0]
    model = eight_bit.stack(here)
    reference = eight_bit.run(eight_bit.stack(here), here)
    if first:
        eight_bit.run(model, here)
    elif sentence := unmet("bitsandbytes>=0.43.2"):
        pytest.skip(f"before 0.43.2 Int8Params has no __deepcopy__, a copy loses CB and SCB; {sentence}")
    twin = copy.deepcopy(model)
    assert torch.equal(eight_bit.run(twin, here), reference)
    model.to("cpu")
    assert torch.equal(eight_bit.run(twin, here), reference)
    thawed = pickle.loads(pickle.dumps(model))
    assert [tensor.device.type for tensor in thawed.parameters()] == ["cpu"] * len(list(model.parameters()))


def test_compiles_without_a_break():
    import torch

    eight_bit.skip_without_cpu_kernels()
    if sentence := unmet(ONE_GRAPH["8-bit"]):
        pytest.skip(f"8-bit layers compile in one graph from torch 2.10 on; {sentence}")
    model = eight_bit.stack("cpu")
    inputs = eight_bit.batch("cpu").float()
    with torch.no_grad():
        reference = model.float()(inputs)
        compiled = torch.compile(model, fullgraph=True, backend="eager")(inputs)
    assert torch.equal(compiled, reference)
