"""bnb-params4bit-deepcopy: a deep copy of a 4-bit model keeps the original alive, and half of its state behind."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest

import diffusers_quantfix
from diffusers_quantfix.weights.companions import companions
from tests.fixes import eight_bit, four_bit
from tests.gate import unmet

FIX_ID = "bnb-params4bit-deepcopy"
SHOWS = "the copy keeps the original alive|the copy takes|stayed behind"


@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_original_is_freed(gpu, quant_type, double_quant):
    import torch

    here, there = gpu.pair
    model = four_bit.stack(here, quant_type, double_quant)
    reference = four_bit.run(model, here)
    twin = copy.deepcopy(model)
    assert torch.equal(four_bit.run(twin, here), reference)
    for layer in four_bit.layers_of(twin):
        assert layer.quant_state is layer.weight.quant_state, (
            "the copy takes another quant state than its weight"
        )
    twin.to(there)
    for module in twin.modules():
        for one in companions(module):
            assert one.tensor.device == there, f"{one.name} stayed behind"
    assert torch.equal(four_bit.run(twin, there), reference)
    watched = weakref.ref(model[0])
    del model
    gc.collect()
    assert watched() is None, "the copy keeps the original alive"


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.46")
def test_on_a_machine_without_gpu():
    model = four_bit.stack("cpu")
    twin = copy.deepcopy(model)
    watched = weakref.ref(model[0])
    del model
    gc.collect()
    assert watched() is None, "the copy keeps the original alive"
    four_bit.assert_whole(twin, "cpu")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_what_the_copy_takes(gpu):
    here = gpu.devices[0]
    model = four_bit.stack(here)
    before = gpu.allocated(here)
    own = four_bit.bytes_of(model)
    twin = copy.deepcopy(model)
    taken = gpu.allocated(here) - before
    # Each layer of the copy has a table of its own, which quantized layers share.
    assert own <= taken <= own + 2 * 64, f"the copy takes {taken / own:.2f} times the memory of the original"
    del twin


def test_everything_is_copied(gpu):
    """Attributes of others, ties and requires_grad; a parameter that is copied alone has no layer."""
    import torch

    here = gpu.devices[0]
    layer = four_bit.linear(here, double_quant=True)
    layer.weight.tag = ["a list"]
    alone = copy.deepcopy(layer.weight)
    assert type(alone) is type(layer.weight)
    assert alone.module is None
    assert alone.tag == ["a list"]
    assert alone.tag is not layer.weight.tag
    assert alone.bnb_quantized
    assert not alone.requires_grad
    assert alone.data_ptr() != layer.weight.data_ptr()
    assert vars(alone).keys() == vars(layer.weight).keys()
    assert vars(alone.quant_state).keys() == vars(layer.quant_state).keys()
    tied = torch.nn.ModuleList([layer, four_bit.linear(here)])
    tied[1].weight = layer.weight
    twin = copy.deepcopy(tied)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not layer.weight
    assert twin[0].weight.module is twin[0]
    assert twin[1].quant_state is not tied[1].quant_state


def test_a_subclass_says_what_is_copied(gpu):
    """What cannot be copied is left out by its ``__getstate__``, as without the package."""
    import threading

    import torch
    from bitsandbytes.nn import Params4bit

    class Leaves(Params4bit):
        def __getstate__(self):
            state = super().__getstate__()
            state.pop("lock", None)
            return state

    class Makes(Leaves):
        def __setstate__(self, state):
            super().__setstate__(state)
            self.lock = "a new one"

    for cls, lock in ((Leaves, None), (Makes, "a new one")):
        layer = four_bit.linear(gpu.devices[0])
        values = vars(layer.weight)
        layer.weight = torch.Tensor._make_subclass(cls, layer.weight.data, False)
        vars(layer.weight).update(values, lock=threading.Lock(), module=layer)
        twin = copy.deepcopy(layer)
        assert type(twin.weight) is cls
        assert getattr(twin.weight, "lock", None) == lock
        assert twin.weight.data_ptr() != layer.weight.data_ptr()
        assert torch.equal(twin.weight.data, layer.weight.data)
        assert twin.weight.quant_state is not layer.weight.quant_state
        if diffusers_quantfix.status(load=False)[FIX_ID].state == "applied":
            assert twin.weight.module is twin


def test_not_quantized_yet(gpu):
    import torch
    from bitsandbytes.nn import Linear4bit

    here = gpu.devices[0]
    layer = Linear4bit(64, 64, quant_type="nf4")
    twin = copy.deepcopy(layer)
    assert twin.weight.module is twin
    assert twin.to(here).quant_state is twin.weight.quant_state
    assert torch.equal(layer.to(here).weight.data, twin.weight.data)


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_eight_bit_layers_are_copied_whole(gpu, ran):
    """Upstream does so since 0.43.2, matrix and alias included."""
    import torch

    if sentence := unmet("bitsandbytes>=0.43.2"):
        pytest.skip(
            f"before, a deep copy of an Int8Params loses its matrices (bitsandbytes PR 1231); {sentence}"
        )
    here = gpu.devices[0]
    model = eight_bit.stack(here)
    reference = eight_bit.run(eight_bit.stack(here), here)
    if ran:
        eight_bit.run(model, here)
    before = gpu.allocated(here)
    own = four_bit.bytes_of(model)
    twin = copy.deepcopy(model)
    assert gpu.allocated(here) - before <= own
    del model
    assert torch.equal(eight_bit.run(twin, here), reference)


@pytest.mark.parametrize(
    "chosen", itertools.permutations([FIX_ID, "bnb-params4bit-shared-state"]), ids="+".join
)
def test_in_every_order(gpu, chosen):
    import torch

    here, there = gpu.pair
    try:
        diffusers_quantfix.revert(*chosen)
        for fix_id in chosen:
            diffusers_quantfix.apply(fix_id)
            twin = copy.deepcopy(four_bit.stack(here))
            reference = four_bit.run(twin, here)
            assert torch.equal(four_bit.run(twin.to(there), there), reference)
            four_bit.assert_whole(twin, there)
    finally:
        diffusers_quantfix.apply(*chosen)
