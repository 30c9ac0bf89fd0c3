"""bnb-cpu-packing: the functions that repack a weight and undo it, and where the patch stands for them."""

from __future__ import annotations

import copy
import types

import pytest

import diffusers_quantfix
from diffusers_quantfix.engine.draft import Draft
from diffusers_quantfix.fixes.bitsandbytes import cpu_packing
from diffusers_quantfix.weights import params_4bit
from tests.fixes import four_bit, packing
from tests.fixes.callers import stopped_at_each_line
from tests.gate import unmet

FIX_ID = "bnb-cpu-packing"

nf4 = pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])


def test_the_kernel_is_still_used():
    packing.needs_the_kernel()
    layer = four_bit.linear("cpu")
    data, state = layer.weight.data.clone(), layer.weight.quant_state
    four_bit.run(layer, "cpu")
    assert layer.weight.quant_state is state is layer.quant_state
    assert state.packing_format_for_cpu
    assert layer.weight.shape != data.shape
    layer.state_dict()
    assert packing.torch_equal(layer.weight.data, data)
    assert not getattr(state, "packing_format_for_cpu", False)


@pytest.mark.parametrize("owned", [True, False], ids=["the parameter", "its bytes"])
def test_gradients_through_the_function(owned):
    """``bitsandbytes.matmul_4bit`` with the parameter, which is unpacked for good, or with its bytes alone."""
    import bitsandbytes
    import torch

    packing.needs_the_kernel()
    layer = four_bit.linear("cpu")
    weight = packing.dequantized(layer)
    four_bit.run(layer, "cpu")
    inputs = four_bit.batch("cpu").requires_grad_()
    bytes_ = layer.weight if owned else layer.weight.data
    bitsandbytes.matmul_4bit(inputs, bytes_, quant_state=layer.weight.quant_state).sum().backward()
    assert torch.allclose(inputs.grad, weight.sum(0).expand_as(inputs), atol=1e-4)
    assert getattr(layer.weight.quant_state, "packing_format_for_cpu", False) is not owned
    assert torch.equal(packing.dequantized(layer), weight)


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
@nf4
def test_the_inverse_is_exact_on_every_cpu(double_quant, storage):
    """The two functions themselves, which need no AVX512."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn import modules

    packing.needs_packing()
    pack, unpack = (
        functional._convert_weight_packed_for_cpu,
        functional._convert_weight_packed_for_cpu_inverse,
    )
    if not packing.packs():  # then the fix stayed away
        functions, draft = types.ModuleType(functional.__name__), Draft("bnb-cpu-packing")
        vars(functions).update(vars(functional))
        cpu_packing.wrap_functions(functions, draft, lambda: True)
        made = {entry.name: entry.new for entry in draft.entries}
        pack, unpack = (
            made["_convert_weight_packed_for_cpu"],
            made["_convert_weight_packed_for_cpu_inverse"],
        )
    layer = packing.shaped(96, 192, double_quant, quant_storage=getattr(torch, storage))
    data, state = layer.weight.data.clone(), copy.deepcopy(layer.weight.quant_state)
    packed, packed_state = pack(layer.weight.data, layer.weight.quant_state)
    assert packed.shape == (96, 96)
    assert packed_state.packing_format_for_cpu
    back, back_state = unpack(packed, packed_state)
    assert back_state is layer.weight.quant_state
    assert back.dtype == data.dtype
    assert torch.equal(back.view(torch.uint8), data.view(torch.uint8))
    assert packing.same_state(back_state, state)
    assert modules  # imported to its end


@pytest.mark.parametrize("capable", [False, True])
def test_the_gate_asks_the_cpu(monkeypatch, capable):
    from bitsandbytes import functional
    from bitsandbytes.nn import modules

    packing.needs_packing()
    for name in ("_convert_weight_packed_for_cpu", "_convert_weight_packed_for_cpu_inverse"):
        upstreams = getattr(functional, name)
        monkeypatch.setattr(modules, name, getattr(upstreams, "__wrapped__", upstreams))
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: capable)
    assert cpu_packing.broken(modules) is capable


def test_torch_compile():
    import torch

    packing.needs_packing()
    if packing.packs() and (sentence := unmet("bitsandbytes>=0.50")):
        pytest.skip(f"the shapes of the kernel are known to torch.compile from 0.50 on; {sentence}")
    if not unmet("bitsandbytes>=0.50") and (sentence := unmet("torch>=2.8")):
        pytest.skip(f"older ones compile no product of these weights; {sentence}")
    layer = four_bit.linear("cpu")
    inputs = four_bit.batch("cpu")
    with torch.no_grad():
        expected = layer(inputs)  # in eager mode, which repacks where this CPU can
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(inputs), expected)
        assert torch.equal(compiled(inputs), expected)


def test_nothing_stands_in_a_forward_pass_until_a_weight_is_repacked():
    """And from then on it stands there whenever the fix does."""
    import bitsandbytes

    packing.needs_the_kernel()

    def is_watched():
        return bitsandbytes.matmul_4bit.__code__ is cpu_packing.make_matmul(len).__code__

    layer = four_bit.linear("cpu")
    diffusers_quantfix.revert(FIX_ID)
    try:
        assert not is_watched()
    finally:
        diffusers_quantfix.apply(FIX_ID)
    four_bit.run(layer, "cpu")
    assert is_watched()
    diffusers_quantfix.revert(FIX_ID)
    try:
        assert not is_watched()
    finally:
        diffusers_quantfix.apply(FIX_ID)
    assert is_watched(), "a weight may be repacked already"


def _repack(layer) -> None:
    """What the first forward pass does on a CPU with AVX512-BF16."""
    from bitsandbytes.nn import modules

    layer.weight.data, _ = modules._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)


@nf4
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda layer: layer.train(), id="train"),
        pytest.param(lambda layer: layer.state_dict(), id="state_dict"),
        pytest.param(lambda layer: layer.weight.to("cpu"), id="to"),
    ],
)
def test_ctrl_c_while_it_is_undone(double_quant, work):
    """At no line are the bytes those of one layout and the quant state that of the other."""
    import torch

    packing.needs_packing()

    def repacked():
        layer = four_bit.linear("cpu", "nf4", double_quant)
        _repack(layer)
        return layer

    weight = packing.dequantized(four_bit.linear("cpu", "nf4", double_quant))
    packed = repacked().weight.shape
    count = 0
    for count, layer in enumerate(stopped_at_each_line(repacked, work, params_4bit, cpu_packing), 1):  # noqa: B007
        is_packed = getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
        assert is_packed == (layer.weight.shape == packed)
        assert torch.equal(packing.dequantized(layer), weight)
    assert count > 5
    assert torch._C._is_torch_function_enabled()


@nf4
def test_ctrl_c_while_a_weight_is_repacked(double_quant):
    """The quant state changes at once, with the last line. Upstream sets the bytes afterwards."""
    from bitsandbytes import functional

    packing.needs_packing()
    unpacked = four_bit.linear("cpu", "nf4", double_quant).weight.quant_state
    seen = [
        packing.same_state(layer.weight.quant_state, unpacked)
        for layer in stopped_at_each_line(
            lambda: four_bit.linear("cpu", "nf4", double_quant), _repack, functional, cpu_packing
        )
    ]
    assert len(seen) > 20
    assert all(seen[:-1])
