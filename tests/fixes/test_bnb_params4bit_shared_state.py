"""bnb-params4bit-shared-state: moving a 4-bit parameter changes the one it was made of."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest

import diffusers_quantfix
from diffusers_quantfix.weights.companions import companions
from tests.fixes import four_bit

FIX_ID = "bnb-params4bit-shared-state"
SHOWS = (
    r"on the same device|on the same GPU|must be on cuda|All tensors must be"
    r"|is on cpu, not on cuda"
)
# All that put something on the same methods.
TOGETHER = ("bnb-linear4bit-conversion", FIX_ID, "bnb-quant-state-meta")


def on(device, parameter) -> None:
    """The parameter and all of its quant state are on ``device``."""
    import torch

    tensors = [one.tensor for one in companions(torch.nn.ParameterList([parameter]))]
    assert len(tensors) >= 2
    assert {tensor.device for tensor in [parameter, *tensors]} == {torch.device(device)}


@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_copy_on_the_cpu(gpu, quant_type, double_quant):
    """``{name: p.to("cpu") for name, p in model.named_parameters()}`` leaves the model alone."""
    import torch

    here, there = gpu.pair
    model = four_bit.stack(here, quant_type, double_quant)
    reference = four_bit.run(model, here, rows=1)
    copies = {name: parameter.to("cpu") for name, parameter in model.named_parameters()}
    if not double_quant:  # a nested quant state on the CPU reaches CPU kernels, which not every release has
        assert torch.equal(four_bit.run(model, here, rows=1), reference)
    four_bit.assert_whole(model, here)
    assert torch.equal(four_bit.run(model, here, rows=1), reference)
    for index in (0, 2):
        weight = copies[f"{index}.weight"]
        on("cpu", weight)
        assert weight.bnb_quantized
        assert weight.module is None, "a copy must not keep the layer alive"
        model[index].weight = weight.to(there)
    model[1].to(there)
    model[0].bias.data, model[2].bias.data = model[0].bias.to(there), model[2].bias.to(there)
    assert torch.equal(four_bit.run(model, there, rows=1), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_embedding(gpu):
    import torch

    here = gpu.devices[0]
    layer = four_bit.embedding(here)
    reference = four_bit.look_up(layer, here)
    copied = layer.weight.to("cpu")
    four_bit.assert_whole(layer, here)
    on("cpu", copied)
    assert torch.equal(four_bit.look_up(layer, here), reference)


def holder(device):
    """A module of no library that has a 4-bit weight, without a reference to its quant state."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = torch.nn.ParameterList([four_bit.linear(device).weight])
            self.matrices[0].module = None

        def forward(self, inputs):
            (weight,) = self.matrices
            return inputs @ dequantize_4bit(weight.data, weight.quant_state).t()

    return Holder()


def with_lora(device):
    """A 4-bit layer with a LoRA of PEFT's over it."""
    import torch

    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    model = torch.nn.Sequential(four_bit.linear(device))
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    try:
        return peft.inject_adapter_in_model(config, model).to(device).eval()
    except ImportError as error:
        pytest.skip(f"these releases have no LoRA over 4-bit layers: {error}")


def model_of(kind, device):
    makers = {
        "linear": four_bit.stack,
        "double": lambda device: four_bit.stack(device, "nf4", True),
        "lora": with_lora,
        "anything": holder,
    }
    return makers[kind](device)


@pytest.mark.parametrize("kind", ["linear", "double", "lora", "anything"])
def test_a_model_still_moves(gpu, kind):
    """Every holder follows ``model.to``: the parameters stay the same objects, and nothing stays behind."""
    import torch

    here, there = gpu.pair
    before = gpu.allocated(here)
    model = model_of(kind, here)
    inputs = four_bit.batch(here)
    with torch.no_grad():
        reference = model(inputs).cpu()
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    for device in (there, "cpu", here, there):
        model.to(device)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
        for module in model.modules():
            for one in companions(module):
                assert one.tensor.device == torch.device(device), one.name
        if device == there:
            with torch.no_grad():
                assert torch.equal(model(inputs.to(there)).cpu(), reference)
    del inputs
    # bitsandbytes keeps its code tables for each device that it ever quantized on.
    assert gpu.allocated(here) <= before + 2048


def test_the_reference_of_the_layer_follows(gpu):
    """Also of a layer whose weight does not know it, as after some ways of loading."""
    here, there = gpu.pair
    model = four_bit.stack(here)
    model[0].weight.module = None
    model.to(there)
    for layer in (model[0], model[2]):
        assert layer.quant_state is layer.weight.quant_state
    assert model[2].weight.module is model[2]


def test_a_weight_that_replaces_the_layers(gpu):
    """accelerate's ``set_module_tensor_to_device`` builds the new weight out of the attributes of the old one."""
    import torch
    from accelerate.utils import set_module_tensor_to_device

    here, there = gpu.pair
    layer = four_bit.linear(here)
    reference = four_bit.run(layer, here)
    data, bias = layer.weight.data, layer.bias.data
    before = gpu.allocated(here)
    set_module_tensor_to_device(layer, "weight", there, value=data.cpu())
    set_module_tensor_to_device(layer, "bias", there, value=bias.cpu())
    assert layer.quant_state is layer.weight.quant_state
    assert layer.weight.module is layer
    four_bit.assert_whole(layer, there)
    assert torch.equal(four_bit.run(layer, there), reference)
    del data, bias
    assert gpu.allocated(here) < before


def test_bytes_of_another_parameter_bring_their_quant_state(gpu):
    import torch

    here = gpu.devices[0]
    one, other = four_bit.linear(here, seed=1), four_bit.linear(here, seed=2)
    other.bias.data = one.bias.data
    reference = four_bit.run(other, here)
    one.weight.data = other.weight
    assert one.quant_state is one.weight.quant_state is other.weight.quant_state
    assert torch.equal(four_bit.run(one, here), reference)
    # The constructor assigns ``data`` as well; there the caller chose the quant state.
    chosen = type(one.weight)(other.weight, quant_state=four_bit.linear(here, seed=3).quant_state)
    assert chosen.quant_state is not other.weight.quant_state


def test_casts_and_unquantized_weights_are_upstreams(gpu):
    import torch

    here = gpu.devices[0]
    weight = four_bit.linear(here).weight
    assert weight.to(torch.uint8).quant_state is weight.quant_state
    fresh = type(weight)(torch.randn(four_bit.FEATURES, four_bit.FEATURES), compress_statistics=False)
    assert fresh.to(here) is fresh
    on(here, fresh)


def applied() -> list[str]:
    return sorted(
        fix.id for fix in diffusers_quantfix.status() if fix.id in TOGETHER and fix.state == "applied"
    )


@pytest.mark.parametrize("chosen", [(FIX_ID,), *itertools.permutations(TOGETHER)], ids="+".join)
def test_alone_and_in_every_order(gpu, chosen):
    """Applied in any order, or without the others, the patches of ``.to`` and of ``_apply`` say the same.

    None of them takes itself for superfluous because another one is there.
    """
    import torch

    here, there = gpu.pair
    assert applied() == sorted(TOGETHER)
    try:
        diffusers_quantfix.revert(*TOGETHER)
        for fix_id in chosen:
            diffusers_quantfix.apply(fix_id)
        assert applied() == sorted(chosen)
        model = four_bit.stack(here, "nf4", True)
        reference = four_bit.run(model, here)
        identities = [id(parameter) for parameter in model.parameters()]
        for weight in (model[0].weight, model[2].weight):
            on("cpu", weight.to("cpu"))
            if set(chosen) == set(TOGETHER):
                assert weight.to("meta").is_meta
        four_bit.assert_whole(model, here)
        for device in (there, "cpu", there, here):
            model.to(device)
            four_bit.assert_whole(model, device)
            assert [layer.quant_state is layer.weight.quant_state for layer in (model[0], model[2])] == [
                True
            ] * 2
        assert torch.equal(four_bit.run(model, here), reference)
        assert [id(parameter) for parameter in model.parameters()] == identities
    finally:
        diffusers_quantfix.revert(*TOGETHER)
        diffusers_quantfix.apply(*TOGETHER)
    assert applied() == sorted(TOGETHER)


def test_pickle_deepcopy_and_compile():
    import torch

    from tests.gate import ONE_GRAPH, unmet

    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"bitsandbytes compiles in one graph from 0.46 on; {sentence}")
    layer = four_bit.linear("cpu").train()  # in training mode a CPU with AVX512-BF16 does not repack
    inputs = four_bit.batch("cpu")
    with torch.no_grad():
        expected = layer(inputs)
        assert torch.equal(copy.deepcopy(layer)(inputs), expected)
        assert torch.equal(pickle.loads(pickle.dumps(layer))(inputs), expected)
        if sentence := unmet(ONE_GRAPH["4-bit"]):
            pytest.skip(f"4-bit layers compile in one graph from torch 2.8 on; {sentence}")
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(inputs), expected)
        layer.to("cpu")
        assert torch.equal(compiled(inputs), expected)
