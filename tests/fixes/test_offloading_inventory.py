"""A group is searched again wherever something of it was exchanged since its last move, and nothing is kept alive."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest

from tests.gate import unmet
from tests.marks import rest_is_long

pytestmark = pytest.mark.skipif(bool(unmet("bitsandbytes>=0.46")), reason="quantizes on the CPU since 0.46")

BITS = (4, 8)


def group_of(bits: int, layers: int = 2):
    """A group of quantized layers on the CPU, with a plain bias each, in a sequence."""
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    made = [
        Linear4bit(64, 64, quant_type="nf4") if bits == 4 else Linear8bitLt(64, 64, has_fp16_weights=False)
        for _ in range(layers)
    ]
    model = torch.nn.Sequential(*made).to("cpu")
    return SimpleNamespace(
        modules=[model],
        parameters=[],
        buffers=[],
        offload_leader=model,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
    )


def found(group):
    from diffusers_quantfix.offloading.inventory import inventory_of

    return inventory_of(group, dropping=False)


def new_weight(group):
    import torch

    group.modules[0][0].weight = copy.deepcopy(group.modules[0][0].weight)
    assert isinstance(group.modules[0][0].weight, torch.nn.Parameter)


def new_data(group):
    weight = group.modules[0][1].weight
    weight.data = weight.data.clone()


def other_layout(group):
    bias = group.modules[0][0].bias
    bias.data = bias.data.view(8, 8)


def new_companion(group):
    weight = group.modules[0][0].weight
    if hasattr(weight, "SCB"):
        weight.SCB = weight.SCB.clone()
    else:
        weight.quant_state.absmax = weight.quant_state.absmax.clone()


def companion_in_other_memory(group):
    weight = group.modules[0][0].weight
    tensor = weight.SCB if hasattr(weight, "SCB") else weight.quant_state.absmax
    tensor.data = tensor.data.clone()


def no_companion(group):
    weight = group.modules[0][0].weight
    if hasattr(weight, "SCB"):
        weight.SCB = None
    else:
        weight.quant_state.absmax = None


def new_state(group):
    layer = group.modules[0][1]
    if hasattr(layer.weight, "SCB"):
        layer.state = copy.copy(layer.state)
    else:
        layer.weight.quant_state = layer.quant_state = copy.copy(layer.weight.quant_state)


def companion_by_another_name(group):
    layer = group.modules[0][1]
    layer.another = copy.copy(layer.state if hasattr(layer.weight, "SCB") else layer.weight.quant_state)


def no_bias(group):
    group.modules[0][0].bias = None


def new_buffer(group):
    import torch

    group.modules[0][0].register_buffer("more", torch.zeros(1))


def new_child(group):
    import torch

    group.modules[0][1].lora = torch.nn.Linear(64, 2)


def no_child(group):
    del group.modules[0][1]


def new_list(group):
    import torch

    group.parameters = [torch.nn.Parameter(torch.zeros(1))]


EXCHANGES = (
    new_weight, new_data, other_layout, new_companion, companion_in_other_memory, no_companion, new_state,
    companion_by_another_name, no_bias, new_buffer, new_child, no_child, new_list,
)  # fmt: skip


@pytest.mark.parametrize("bits", rest_is_long(BITS, 4))
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda each: each.__name__)
def test_what_was_exchanged_is_searched_for(bits, exchange):
    group = group_of(bits)
    first, _ = found(group)
    assert found(group)[0] is first
    exchange(group)
    gc.collect()
    second, look = found(group)
    assert second is not first
    assert found(group)[0] is second
    assert {tensor.data_ptr() for tensor in look.tensors} == {
        tensor.data_ptr() for tensor in found(group)[1].tensors
    }


@pytest.mark.parametrize("bits", BITS)
def test_other_attributes_may_change(bits):
    group = group_of(bits)
    first, _ = found(group)
    layer = group.modules[0][0]
    for value in (None, 3, "text", object()):
        layer.note = value
        assert found(group)[0] is first
    del layer.note
    assert found(group)[0] is first


@pytest.mark.parametrize("bits", BITS)
def test_tied_parameters_that_are_two_again(bits):
    import torch

    group = group_of(bits)
    first, second = group.modules[0]
    second.bias = first.bias
    known, _ = found(group)
    assert found(group)[0] is known
    second.bias = torch.nn.Parameter(first.bias.data)
    assert found(group)[0] is not known


@pytest.mark.parametrize("bits", BITS)
def test_a_sparse_buffer_in_place_of_a_dense_one(bits):
    """It has no address to compare."""
    import torch

    group = group_of(bits)
    layer = group.modules[0][0]
    layer.register_buffer("mask", torch.eye(4))
    known, _ = found(group)
    layer.mask = torch.eye(4).to_sparse()
    second, look = found(group)
    assert second is not known and found(group)[0] is second
    assert [tensor.layout for tensor in look.tensors].count(torch.sparse_coo) == 1
    layer.mask = torch.eye(4)
    assert found(group)[0] is not second


@pytest.mark.parametrize("bits", BITS)
def test_nothing_is_kept_alive(bits):
    group = group_of(bits)
    found(group)
    layer = group.modules[0][0]
    parts = [weakref.ref(layer.weight), weakref.ref(layer)]
    group.modules = [group.modules[0][1]]
    group.offload_leader = group.modules[0]
    del layer
    gc.collect()
    assert [part() for part in parts] == [None, None]


@pytest.mark.parametrize("bits", BITS)
def test_weights_can_be_swapped(bits):
    import torch

    group = group_of(bits)
    found(group)
    weight = group.modules[0][0].weight
    torch.utils.swap_tensors(weight, copy.deepcopy(weight))


@pytest.mark.parametrize("bits", BITS)
def test_a_copy_is_searched(bits):
    from diffusers_quantfix.offloading.inventory import Inventory

    group = group_of(bits)
    known, _ = found(group)
    assert isinstance(pickle.loads(pickle.dumps(known)), Inventory)
    other = copy.deepcopy(group)
    own, look = found(other)
    assert own is not known
    assert all(
        one.data_ptr() != two.data_ptr()
        for one, two in zip(look.tensors, found(group)[1].tensors, strict=True)
    )
