"""bnb-cpu-packing: one forward pass on a CPU with AVX512-BF16 corrupts a 4-bit layer.

On other CPUs the gate says healthy, and the bodies pass on both sides; the functions that repack are tested anyway.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest

import diffusers_quantfix
from tests.fixes import four_bit, packing
from tests.gate import unmet

FIX_ID = "bnb-cpu-packing"
SHOWS = (
    r"the weight changed|the state dict changed|the output changed|N must be divisible by block_n"
    r"|is invalid for input of size|does not require grad|a view of a leaf Variable that requires grad"
    r"|has no attribute 'state2'"
)
ON_THE_CPU = "bitsandbytes>=0.46"  # the first release that quantizes there
TOGETHER = (FIX_ID, "bnb-params4bit-deepcopy", "bnb-params4bit-shared-state", "bnb-quant-state-meta")

nf4 = pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])


@nf4
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=ON_THE_CPU)
def test_dequantize_after_a_forward_pass(double_quant):
    import torch

    layer = four_bit.linear("cpu", "nf4", double_quant)
    before = packing.dequantized(layer)
    for _ in range(2):
        reference = four_bit.run(layer, "cpu")
        assert torch.equal(packing.dequantized(layer), before), "the weight changed"
    assert torch.equal(four_bit.run(layer, "cpu"), reference), "the output changed"


@nf4
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=ON_THE_CPU)
def test_state_dict_after_a_forward_pass(double_quant):
    import torch
    from bitsandbytes.functional import QuantState, dequantize_4bit

    layer = four_bit.linear("cpu", "nf4", double_quant)
    before, weight = four_bit.state_of(layer), packing.dequantized(layer)
    four_bit.run(layer, "cpu")
    after = four_bit.state_of(layer)
    assert four_bit.differences(before, after) == [], "the state dict changed"
    parts = {
        name.removeprefix("weight."): value for name, value in after.items() if name.startswith("weight.")
    }
    loaded = QuantState.from_dict(parts, "cpu")
    assert torch.equal(dequantize_4bit(after["weight"], loaded).float(), weight), "the weight changed"


@nf4
@pytest.mark.parametrize("way", ["to", "cuda"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=ON_THE_CPU)
def test_to_a_gpu_after_a_forward_pass(gpu, double_quant, way):
    import torch

    here = gpu.devices[0]
    layer = four_bit.linear("cpu", "nf4", double_quant)
    reference = four_bit.run(copy.deepcopy(layer).to(here), here)
    four_bit.run(layer, "cpu")
    getattr(layer, way)(here)
    assert torch.equal(four_bit.run(layer, here), reference), "the output changed"
    four_bit.assert_whole(layer, here)


@nf4
@pytest.mark.parametrize(("rows", "columns"), [(48, 128), (64, 96), (48, 96)])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=ON_THE_CPU)
def test_any_shape(rows, columns, double_quant):
    import torch

    layer = packing.shaped(rows, columns, double_quant)
    weight, inputs = packing.dequantized(layer), torch.randn(3, columns)
    with torch.no_grad():
        result = layer(inputs)
    expected = torch.nn.functional.linear(inputs, weight, layer.bias)
    assert torch.allclose(result, expected, atol=1e-4)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=ON_THE_CPU)
def test_gradients_after_inference(double_quant=False):
    import torch

    layer = four_bit.linear("cpu", "nf4", double_quant)
    weight = packing.dequantized(layer)
    four_bit.run(layer, "cpu")
    inputs = four_bit.batch("cpu").requires_grad_()
    layer.train()(inputs).sum().backward()
    assert torch.allclose(inputs.grad, weight.sum(0).expand_as(inputs), atol=1e-4)


@nf4
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=ON_THE_CPU)
def test_training_after_inference_is_as_without_it(double_quant):
    """Also where the input of a layer has no gradient: the first layer gets one from its adapter only."""
    import torch

    pytest.importorskip("peft", reason="peft is not installed")
    from peft import LoraConfig, inject_adapter_in_model

    gradients = []
    for inference in (False, True):
        model = four_bit.stack("cpu", "nf4", double_quant)
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["2"], init_lora_weights=False), model)
        if inference:
            four_bit.run(model, "cpu")
        model.train()
        model(four_bit.batch("cpu")).pow(2).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0], "there are no gradients"
    assert all(map(torch.equal, *gradients)), "the output changed"


@nf4
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=ON_THE_CPU)
def test_a_lora_that_is_merged_after_a_forward_pass(double_quant):
    """PEFT gives the merged weight, which is to be quantized yet, all attributes of the old one."""
    peft = pytest.importorskip("peft")
    import torch

    class Model(torch.nn.Module):
        is_loaded_in_4bit = True

        def __init__(self):
            super().__init__()
            self.layer = four_bit.linear("cpu", "nf4", double_quant)

        def forward(self, inputs):
            return self.layer(inputs)

    def merged(run_before: bool):
        torch.manual_seed(0)
        model = peft.get_peft_model(
            Model(), peft.LoraConfig(r=4, target_modules=["layer"], init_lora_weights=False)
        ).eval()
        if run_before:
            with torch.no_grad():
                model(four_bit.batch("cpu"))
        return model.merge_and_unload().layer

    reference, layer = merged(False), merged(True)
    for _ in range(2):
        assert torch.equal(packing.dequantized(layer), packing.dequantized(reference)), "the weight changed"
        assert torch.equal(four_bit.run(layer, "cpu"), four_bit.run(reference, "cpu")), "the output changed"


def test_copies_and_pickles_after_a_forward_pass():
    import torch

    packing.needs_the_kernel()
    layer = four_bit.linear("cpu", "nf4", True)
    weight = packing.dequantized(layer)
    reference = four_bit.run(layer, "cpu")
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in twins:
        assert torch.equal(packing.dequantized(twin), weight)
        assert torch.equal(four_bit.run(twin, "cpu"), reference)
        assert torch.equal(packing.dequantized(twin), weight)
    assert torch.equal(four_bit.run(layer, "cpu"), reference)


def test_a_backward_pass_that_waits_during_inference():
    """The bytes that autograd saved are as they were, the quant state is repacked meanwhile."""
    import torch

    packing.needs_the_kernel()
    layer = four_bit.linear("cpu")
    weight = packing.dequantized(layer)
    inputs = four_bit.batch("cpu").requires_grad_()
    output = layer(inputs)
    four_bit.run(layer, "cpu")
    assert layer.weight.quant_state.packing_format_for_cpu
    output.sum().backward()
    assert torch.allclose(inputs.grad, weight.sum(0).expand_as(inputs), atol=1e-4)


def test_group_offloading_after_a_forward_pass(gpu):
    """It moves ``parameter.data`` alone, past every method of the parameter."""
    import torch

    packing.needs_the_kernel()
    if reason := unmet("diffusers>=0.33"):
        pytest.skip(f"group offloading came with diffusers 0.33.0: {reason}")
    from diffusers.hooks import apply_group_offloading

    here = gpu.devices[0]
    model = torch.nn.Sequential(four_bit.linear("cpu"), four_bit.linear("cpu", "nf4", True))
    inputs = four_bit.batch("cpu")
    with torch.no_grad():
        reference = copy.deepcopy(model).to(here)(inputs.to(here))
        model(inputs)
    assert all(layer.weight.quant_state.packing_format_for_cpu for layer in model)
    apply_group_offloading(model, torch.device(here), torch.device("cpu"), "leaf_level")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(inputs.to(here)), reference)


def test_a_weight_that_moved_by_its_bytes_alone(gpu):
    """``parameter.data = parameter.data.to(...)``, as group offloading does, moves what is repacked."""
    import torch

    from diffusers_quantfix.weights.companions import move_quant_state

    packing.needs_the_kernel()
    here = gpu.devices[0]
    layer = four_bit.linear("cpu")
    reference = four_bit.run(copy.deepcopy(layer).to(here), here)
    four_bit.run(layer, "cpu")
    layer.weight.data = layer.weight.data.to(here)
    layer.bias.data = layer.bias.data.to(here)
    move_quant_state(layer.weight.quant_state, here)
    assert torch.equal(four_bit.run(layer, here), reference)


@pytest.mark.parametrize("chosen", [(FIX_ID,), *itertools.permutations(TOGETHER)], ids="+".join)
def test_alone_and_in_every_order(chosen):
    import torch

    packing.needs_the_kernel()
    try:
        diffusers_quantfix.revert(*TOGETHER)
        for fix_id in chosen:
            diffusers_quantfix.apply(fix_id)
        layer = four_bit.linear("cpu", "nf4", False)
        saved, weight = four_bit.state_of(layer), packing.dequantized(layer)
        reference = four_bit.run(layer, "cpu")
        moved = layer.weight.to("cpu")
        assert packing.torch_equal(moved.data.cpu(), saved["weight"])
        assert torch.equal(four_bit.run(layer, "cpu"), reference)
        twin = copy.deepcopy(layer)
        for one in (layer, twin):
            assert torch.equal(packing.dequantized(one), weight)
            assert torch.equal(four_bit.run(one, "cpu"), reference)
        if len(chosen) > 1:
            offloaded = layer.weight.to("meta")
            assert offloaded.shape == saved["weight"].shape
            assert torch.equal(four_bit.run(layer, "cpu"), reference)
        assert torch.equal(four_bit.run(layer.to("cpu"), "cpu"), reference)
        assert four_bit.differences(four_bit.state_of(layer), saved) == []
    finally:
        diffusers_quantfix.revert(*TOGETHER)
        diffusers_quantfix.apply(*TOGETHER)


def test_loading_after_a_forward_pass():
    """The weight has its shape back before a state dict is loaded into it."""
    import torch

    packing.needs_the_kernel()
    layer, other = four_bit.linear("cpu", seed=1), four_bit.linear("cpu", seed=2)
    other.weight.quant_state.absmax.copy_(layer.weight.quant_state.absmax)
    saved, reference = four_bit.state_of(other), four_bit.run(copy.deepcopy(other), "cpu")
    four_bit.run(layer, "cpu")
    layer.load_state_dict({"weight": saved["weight"], "bias": saved["bias"]})
    assert torch.equal(four_bit.run(layer, "cpu"), reference)
