"""quanto-weight-clone: models with weights of quanto cannot be deep-copied."""

from __future__ import annotations

import copy
import io
import itertools

import pytest

from tests.fixes import quanto_models as q

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


def parts(tensor):
    """The plain tensors inside."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        yield from parts(inner) if hasattr(inner, "__tensor_flatten__") else [inner]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_clone_has_the_class_and_memory_of_its_own(dtype):
    """Each class that the CPU has, tinygemm's among them (int4 in bfloat16, from 0.2.7 on)."""
    import torch

    for qtype in q.QTYPES:
        weight = q.layers(qtype, getattr(torch, dtype))[0].weight
        clone = weight.detach().clone()
        assert type(clone) is type(weight)
        assert (clone.shape, clone.dtype, clone.stride()) == (weight.shape, weight.dtype, weight.stride())
        assert torch.equal(clone.dequantize(), weight.dequantize())
        pairs = list(itertools.zip_longest(parts(weight), parts(clone)))
        assert all(old.data_ptr() != new.data_ptr() for old, new in pairs), "a tensor is shared"
        assert all(torch.equal(old.view(torch.uint8), new.view(torch.uint8)) for old, new in pairs)


def test_the_copy_lives_on_when_the_original_is_gone_or_changed():
    import torch

    model = q.layers("qint8")
    reference = q.run(model)
    twin = copy.deepcopy(model)
    model[0].weight._data.zero_()
    model[0].weight._scale.zero_()
    assert torch.equal(q.run(twin), reference)


def test_another_memory_format_is_dequantized_as_before():
    import torch

    weight = q.layers("qfloat8")[0].weight
    assert type(weight.clone(memory_format=torch.contiguous_format)) is torch.Tensor


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
