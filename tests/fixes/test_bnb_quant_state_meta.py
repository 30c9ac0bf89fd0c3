"""bnb-quant-state-meta: offloading a 4-bit weight to meta destroys its quant state.  Layers; models are next door."""

from __future__ import annotations

import copy
import pickle

import pytest

import diffusers_quantfix
from diffusers_quantfix.weights.companions import companions
from tests.fixes import four_bit
from tests.gate import unmet

FIX_ID = "bnb-quant-state-meta"
# From bitsandbytes 0.46.1 on; up to 0.46.0 the weight is quantized a second time.
SHOWS = (
    r"NotImplementedError: Cannot copy out of meta tensor; no data!"
    r"|uantization only supports 16/32-bit floats, but got torch\.uint8"
)
ON_THE_CPU = "bitsandbytes>=0.46"  # the first release that quantizes there

nf4 = pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])


def offload(model, device, **options):
    import torch
    from accelerate import cpu_offload

    return cpu_offload(model, torch.device(device), **options)


def remove_hooks(model):
    from accelerate.hooks import remove_hook_from_module

    return remove_hook_from_module(model, recurse=True)


@nf4
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=ON_THE_CPU)
def test_three_runs_on_the_cpu(double_quant):
    """No GPU is needed: accelerate puts the weights on meta all the same.

    From 0.49 on a CPU with AVX512-BF16 repacks the weight and its quant state in each forward pass; it must be a copy
    that it repacks, and never the one on the host.
    """
    import torch

    inputs = four_bit.stack("cpu", "nf4", double_quant)
    saved = four_bit.state_of(inputs)
    reference = four_bit.run(inputs, "cpu")
    model = offload(four_bit.stack("cpu", "nf4", double_quant), "cpu")
    assert model[0].weight.is_meta
    for _ in range(3):
        assert torch.equal(four_bit.run(model, "cpu"), reference)
    remove_hooks(model)
    assert four_bit.differences(four_bit.state_of(model), saved) == []
    assert torch.equal(four_bit.run(model, "cpu"), reference)


@pytest.mark.parametrize("start", ["on the GPU", "on the CPU"])
@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_three_runs(gpu, start, quant_type, double_quant):
    import torch

    here = gpu.devices[0]
    reference = four_bit.run(four_bit.stack(here, quant_type, double_quant), here)
    one_row = four_bit.run(four_bit.stack(here, quant_type, double_quant), here, rows=1)
    before = gpu.allocated(here)
    model = four_bit.stack(here, quant_type, double_quant)
    if start == "on the CPU":
        model.to("cpu")
    offload(model, here)
    for _ in range(3):
        assert torch.equal(four_bit.run(model, here), reference)
        assert torch.equal(four_bit.run(model, here, rows=1), one_row)
        left = gpu.allocated(here) - before
        assert left == 0, f"{left} bytes stayed on {here}"


@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_what_travels(rig_devices, quant_type, double_quant):
    """To the device the weights with their quant states, once per run; back from it nothing but the output."""
    import torch

    here = rig_devices.devices[0]
    needed = four_bit.bytes_of(four_bit.stack(here, quant_type, double_quant))
    model = offload(four_bit.stack(here, quant_type, double_quant), here)
    inputs = four_bit.batch(here)
    for _ in range(3):
        rig_devices.reset()
        with torch.no_grad():
            model(inputs)
        traffic = rig_devices.traffic()
        assert (traffic.h2d / needed, traffic.d2h, traffic.d2d) == (1.0, 0, 0)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_peak_is_one_layer(gpu):
    here = gpu.devices[0]
    model = four_bit.stack(here, layers=8)
    layer = four_bit.bytes_of(model[0])
    offload(model, here)
    four_bit.run(model, here)
    gpu.reset()
    before = gpu.allocated(here)
    four_bit.run(model, here)
    # What the CPU kernels behind the rig dequantize does not count as weight; activations are small.
    dequantized = 4 * four_bit.FEATURES**2
    assert gpu.peak(here) - before <= layer + 2 * dequantized


@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_hooks_come_off(gpu, quant_type, double_quant):
    """The model is where and what it was, and can be moved, run, offloaded again."""
    import torch

    here, there = gpu.pair
    original = four_bit.stack(here, quant_type, double_quant)
    reference, saved = four_bit.run(original, here), four_bit.state_of(original)
    model = offload(four_bit.stack(here, quant_type, double_quant), here)
    for _ in range(2):
        four_bit.run(model, here)
        remove_hooks(model)
        four_bit.assert_whole(model, here)
        assert four_bit.differences(four_bit.state_of(model), saved) == []
        assert torch.equal(four_bit.run(model, here), reference)
        model.to(there).to("cpu").to(here)
        four_bit.assert_whole(model, here)
        assert torch.equal(four_bit.run(model, here), reference)
        offload(model, here)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_embedding(gpu, quant_type):
    """Its state dict is not implemented upstream, so that only a hook that makes its own weights map can offload it."""
    import torch
    from accelerate.hooks import attach_align_device_hook

    here = gpu.devices[0]
    reference = four_bit.look_up(four_bit.embedding(here, quant_type), here)
    model = torch.nn.Sequential(four_bit.embedding(here, quant_type))
    attach_align_device_hook(model, execution_device=here, offload=True)
    for _ in range(3):
        assert torch.equal(four_bit.look_up(model, here), reference)
    assert torch.equal(four_bit.look_up(remove_hooks(model), here), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_split_by_a_device_map(gpu):
    """``dispatch_model``: one layer stays on the GPU, the other is offloaded to the CPU."""
    import torch
    from accelerate import dispatch_model

    here = gpu.devices[0]
    reference = four_bit.run(four_bit.stack(here), here)
    model = four_bit.stack(here)
    # Quantized already, so that accelerate's refusal to quantize on the CPU is not met.
    dispatch_model(
        model, {"0": here.index, "1": here.index, "2": "cpu"}, main_device=here.index, force_hooks=True
    )
    for _ in range(3):
        assert torch.equal(four_bit.run(model, here), reference)
    assert model[2].weight.is_meta


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_disk_offload(gpu, tmp_path):
    import torch
    from accelerate import disk_offload

    here = gpu.devices[0]
    reference = four_bit.run(four_bit.stack(here), here)
    model = four_bit.stack(here)
    disk_offload(model, str(tmp_path), here)
    for _ in range(3):
        assert torch.equal(four_bit.run(model, here), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_hook_without_a_weights_map(gpu):
    """The hook then makes the map itself, of the parameters."""
    import torch
    from accelerate.hooks import attach_align_device_hook

    here = gpu.devices[0]
    reference = four_bit.run(four_bit.stack(here), here)
    model = four_bit.stack(here)
    attach_align_device_hook(model, execution_device=here, offload=True)
    for _ in range(3):
        assert torch.equal(four_bit.run(model, here), reference)


def quantized(device="cpu", **options):
    """A ``Params4bit`` in a layer, quantized where this release can and moved to ``device``."""
    return four_bit.linear(device, **options)


def test_the_source_is_not_touched(gpu):
    """``.to("meta")`` gives a copy, like every ``.to``: the layer goes on working, also after the copy came back."""
    import torch

    here, there = gpu.pair
    layer = quantized(here, double_quant=True)
    reference, state = four_bit.run(layer, here), layer.weight.quant_state
    offloaded = layer.weight.to("meta")
    assert offloaded.is_meta
    assert offloaded.bnb_quantized
    back = type(offloaded)(layer.weight.data.cpu(), requires_grad=False, **vars(offloaded)).to(there)
    assert back.device == there
    assert {one.tensor.device for one in companions(torch.nn.ParameterList([back]))} == {there}
    assert layer.weight.quant_state is state
    assert layer.quant_state is state
    four_bit.assert_whole(layer, here)
    assert torch.equal(four_bit.run(layer, here), reference)


def test_every_spelling_of_meta(gpu):
    import torch

    weight = quantized(gpu.devices[0]).weight
    empty = torch.empty(0, device="meta", dtype=torch.uint8)
    for arguments, keywords in (
        (("meta",), {}),
        ((torch.device("meta"),), {}),
        ((torch.device("meta", 0),), {}),
        ((empty,), {}),
        ((), {"device": "meta"}),
        (("meta", None, True), {}),
        (("meta",), {"non_blocking": True}),
    ):
        moved = weight.to(*arguments, **keywords)
        assert moved.is_meta
        assert moved.shape == weight.shape
        assert {one.tensor.device.type for one in companions(torch.nn.ParameterList([moved]))} == {"cpu"}
        assert weight.quant_state.absmax.device == gpu.devices[0]


def test_plain_moves_are_upstreams(gpu):
    """``nn.Module.to`` relies on the change in place of the quant state that old and new parameter share.

    Where ``bnb-params4bit-shared-state`` gives each its own, it sees to ``nn.Module.to`` as well.
    """
    here, there = gpu.pair
    diffusers_quantfix.revert("bnb-params4bit-shared-state")
    try:
        weight = quantized(here).weight
        moved = weight.to(there)
        assert moved.quant_state is weight.quant_state
        assert weight.quant_state.absmax.device == there
        assert moved.bnb_quantized
        assert weight.to(here).quant_state is weight.quant_state
    finally:
        diffusers_quantfix.apply("bnb-params4bit-shared-state")


def test_a_merged_weight_is_quantized_anew(gpu):
    """PEFT builds the merged weight out of floats and all the old attributes, the old quant state included."""
    import torch

    here = gpu.devices[0]
    model = offload(torch.nn.Sequential(quantized(here)), here)
    four_bit.run(model, here)
    layer = remove_hooks(model)[0]
    old = layer.weight
    keywords = {**vars(old), "bnb_quantized": False, "requires_grad": False}
    merged = type(old)(torch.ones(four_bit.FEATURES, four_bit.FEATURES), **keywords).to(here)
    assert merged.quant_state is not old.quant_state
    assert merged.quant_state.absmax.eq(1).all()


def test_pickle_and_deepcopy(gpu):
    """What was offloaded and came back is as ordinary as before."""
    import torch

    here = gpu.devices[0]
    model = offload(torch.nn.Sequential(quantized(here)), here)
    reference = four_bit.run(model, here)
    layer = remove_hooks(model)[0].to("cpu")
    twin = copy.deepcopy(layer).to(here)
    assert torch.equal(four_bit.run(twin, here), reference)
    state = pickle.loads(pickle.dumps(layer.weight.quant_state))
    assert torch.equal(state.absmax, layer.weight.quant_state.absmax)
    assert pickle.loads(pickle.dumps(type(layer.weight).to)) is type(layer.weight).to


def test_torch_compile():
    """A 4-bit layer still compiles in one graph; what we put on ``Params4bit`` is a plain function."""
    import torch

    from tests.gate import ONE_GRAPH, unmet

    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"bitsandbytes compiles in one graph from 0.46 on; {sentence}")
    if sentence := unmet(ONE_GRAPH["4-bit"]):
        pytest.skip(f"4-bit layers compile in one graph from torch 2.8 on; {sentence}")
    layer = quantized("cpu").train()  # in training mode a CPU with AVX512-BF16 does not repack
    inputs = four_bit.batch("cpu")
    with torch.no_grad():
        expected = layer(inputs)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(inputs), expected)
        layer.to("cpu")
        assert torch.equal(compiled(inputs), expected)


@nf4
@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_with_a_weight_on_meta_raises(double_quant, rows):
    """The quant state has its data, and bitsandbytes gave memory that nobody had written to."""
    import torch
    from bitsandbytes.nn import Linear4bit

    if sentence := unmet(ON_THE_CPU):
        pytest.skip(sentence)
    layer = offload(four_bit.linear("cpu", "nf4", double_quant, bias=False), "cpu")
    if sentence := unmet("bitsandbytes>=0.48" if rows == 1 else "bitsandbytes>=0.49"):
        pytest.skip(
            f"it is torch's product before, which does not raise for a plain weight either; {sentence}"
        )
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        Linear4bit.forward(layer, four_bit.batch("cpu", rows))  # past the hook
