"""quanto-weight-clone: models with weights of quanto cannot be deep-copied."""

from __future__ import annotations

import copy
import io
import itertools
import re

import pytest

from tests.fixes import quanto_models as q
from tests.gate import unmet

FIX_ID = "quanto-weight-clone"
SHOWS = r"wrapper subclasses only works for subclass types that implement clone\(\)"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_can_be_deep_copied():
    import torch

    for qtype in q.QTYPES:
        model = q.layers(qtype)
        reference = q.run(model)
        twin = copy.deepcopy(model)
        assert torch.equal(q.run(twin), reference), qtype
        assert type(twin[0].weight) is type(model[0].weight)
        assert isinstance(twin[0].weight, torch.nn.Parameter)
        assert twin[0].weight.requires_grad == model[0].weight.requires_grad


@pytest.mark.parametrize("qtype", q.QTYPES)
def test_a_model_is_copied_under_inference_mode(qtype):
    """Made and copied in it, or outside of it; a copy can be copied again."""
    import torch

    with torch.inference_mode():
        inside = q.layers(qtype)
    model = q.layers(qtype)
    with torch.inference_mode():
        twins = [copy.deepcopy(inside), copy.deepcopy(model)]
    twins += [copy.deepcopy(twin) for twin in (inside, *twins)]
    expected = q.run(model)
    assert all(torch.equal(q.run(twin), expected) for twin in twins)


def parts(tensor):
    """The plain tensors inside."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        yield from parts(inner) if hasattr(inner, "__tensor_flatten__") else [inner]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_copy_has_the_class_and_memory_of_its_own(dtype):
    """Each class that the CPU has, tinygemm's among them (int4 in bfloat16, from 0.2.7 on)."""
    import torch

    for qtype in q.QTYPES:
        weight = q.layers(qtype, getattr(torch, dtype))[0].weight
        twin, again = copy.deepcopy([weight, weight])
        assert twin is again, "it was one weight, and is two"
        assert type(twin) is type(weight)
        assert (twin.shape, twin.dtype, twin.stride()) == (weight.shape, weight.dtype, weight.stride())
        assert torch.equal(twin.dequantize(), weight.dequantize())
        pairs = list(itertools.zip_longest(parts(weight), parts(twin)))
        assert all(old.data_ptr() != new.data_ptr() for old, new in pairs), "a tensor is shared"
        assert all(torch.equal(old.view(torch.uint8), new.view(torch.uint8)) for old, new in pairs)


def test_a_gradient_is_copied_and_a_product_is_refused():
    import torch

    layer = q.layers("qint8")[0]
    weight = layer.weight.requires_grad_(True)
    layer(q.inputs()).sum().backward()
    twin = copy.deepcopy(weight)
    assert twin.requires_grad and torch.equal(twin.grad, weight.grad) and twin.grad is not weight.grad
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(weight * 2)


def test_the_copy_lives_on_when_the_original_is_gone_or_changed():
    import torch

    model = q.layers("qint8")
    reference = q.run(model)
    twin = copy.deepcopy(model)
    model[0].weight._data.zero_()
    model[0].weight._scale.zero_()
    assert torch.equal(q.run(twin), reference)


def test_a_sum_in_place_on_a_clone_is_kept():
    """A clone is a plain tensor, as upstream has it: peft's SHiRA adds to one in each forward pass."""
    import torch

    for qtype in q.QTYPES:
        weight = q.layers(qtype)[0].weight.detach()
        clone = weight.clone()
        clone += 1
        assert torch.equal(clone, weight.dequantize() + 1), qtype


def test_an_adapter_that_adds_to_a_copy_has_its_effect_or_says_that_it_cannot():
    """SHiRA adds to a clone, before peft 0.20 to a deep copy of ``weight.data``, which then is upstream's error."""
    import torch

    peft = pytest.importorskip("peft", reason="peft is not installed")
    if not hasattr(peft, "ShiraConfig"):
        pytest.skip("this peft has no SHiRA")

    def output(model):
        torch.manual_seed(3)
        config = peft.ShiraConfig(r=4, target_modules=["0"], init_weights=False)
        return q.run(peft.get_peft_model(model, config))

    plain = q.plain_layers()
    for dense, layer in zip(plain, q.layers("qint8"), strict=True):
        dense.weight.data = layer.weight.dequantize()
    expected = output(plain)
    try:
        found = output(q.layers("qint8"))
    except RuntimeError as error:
        assert re.search(SHOWS, str(error)) and unmet("peft>=0.20")
    else:
        assert torch.equal(found, expected)


def test_clone_is_differentiable():
    """Training with quanto: the gradient goes through a clone as through the weight."""
    import torch

    weight = q.layers("qint8")[0].weight.requires_grad_(True)
    output = torch.nn.functional.linear(q.inputs(), weight.clone())
    output.sum().backward()
    assert weight.grad is not None and weight.grad.shape == weight.shape


def test_pickle_and_compile_still_work():
    import torch

    for qtype in ("qfloat8", "qint8"):
        model = q.layers(qtype)
        reference = q.run(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        assert type(again[0].weight) is type(model[0].weight)
        assert torch.equal(q.run(again), reference)
        compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
        assert torch.equal(q.run(compiled), reference)
