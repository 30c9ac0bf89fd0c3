"""quanto-freeze-meta: freezing a model of quanto on meta calculates each of its weights."""

from __future__ import annotations

import itertools

import pytest

from diffusers_quantfix.verify.models.quanto_models import counting
from tests.fixes import quanto_models as q
from tests.gate import unmet

FIX_ID = "quanto-freeze-meta"
# An older one cannot freeze on meta: "There was no fake impl registered for quanto::quantize_symmetric".
pytestmark = pytest.mark.skipif(
    bool(unmet("optimum-quanto>=0.2.6")), reason=str(unmet("optimum-quanto>=0.2.6"))
)


def model(weights, dtype=None, device="meta", activations=None, optimizer=None):
    """Layers of which some are alike: of one row, of a width without groups, without a bias, convolutions, norms."""
    import torch

    library = q.quanto()
    layers = [
        *(torch.nn.Linear(256, 64) for _ in range(3)),
        *(torch.nn.Linear(256, 64, bias=False) for _ in range(2)),
        *(torch.nn.Linear(64, 1) for _ in range(2)),
        *(torch.nn.Linear(250, 6) for _ in range(2)),
        *(torch.nn.Conv2d(8, 16, 3) for _ in range(2)),
        *(torch.nn.LayerNorm(8) for _ in range(2)),
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(),
    ]
    stack = torch.nn.Sequential(*(layer.to(dtype or torch.float32) for layer in layers)).to(device)
    options = {} if optimizer is None else {"optimizer": optimizer}
    library.quantize(stack, weights=getattr(library, weights), activations=activations, **options)
    return stack


def told(tensor) -> list:
    """All that a tensor tells of itself, and those inside of it."""
    found = [
        type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad, tensor.is_leaf,
        getattr(tensor, "_is_param", False),
    ]  # fmt: skip
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        found += [context, [told(getattr(tensor, name)) for name in names]]
    return found


def plain_tensors(tensor):
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        yield from plain_tensors(inner) if hasattr(inner, "__tensor_flatten__") else [inner]


def frozen_one_by_one(stack):
    """As ``freeze`` of quanto does it."""
    for layer in stack.modules():
        if hasattr(layer, "qweight"):
            layer.freeze()
    return stack


def frozen(stack):
    q.quanto().freeze(stack)
    return stack


@pytest.mark.defect(FIX_ID, shows=r"\d+ weights without data were quantized")
@pytest.mark.parametrize("weights", q.QTYPES)
def test_layers_that_are_alike_are_quantized_once(weights):
    stack = model(weights)
    with counting() as count:
        frozen(stack)
    # With a bias or without, the weight is the same.
    assert count.quantized <= 5, f"{count.quantized} weights without data were quantized, of 5 kinds"


@pytest.mark.defect(
    FIX_ID,
    shows=r"\d+ weights without data were quantized",
    needs="diffusers>=0.33.0",
)
@pytest.mark.parametrize("weights", ["float8", "int8", "int4", "int2"])
def test_a_saved_model_is_loaded(tmp_path, weights):
    import torch

    saved = q.load_flux(q.saved_flux(tmp_path / "plain"), weights)
    saved.save_pretrained(tmp_path / "quantized")
    with counting() as count:
        loaded = q.load_flux(tmp_path / "quantized", "")
    kinds = {
        (layer.weight.shape, layer.weight.dtype) for layer in loaded.modules() if hasattr(layer, "qweight")
    }
    assert count.quantized <= len(kinds), f"{count.quantized} weights without data were quantized"
    assert torch.equal(q.run_flux(loaded), q.run_flux(saved))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("weights", q.QTYPES)
def test_the_weights_are_those_of_quanto(weights, dtype):
    """Each with tensors of its own."""
    import torch

    for activations in (None, q.quanto().qint8):
        ours = frozen(model(weights, getattr(torch, dtype), activations=activations))
        theirs = frozen_one_by_one(model(weights, getattr(torch, dtype), activations=activations))
        for one, other in zip(ours, theirs, strict=True):
            assert type(one) is type(other)
            assert [*one._parameters] == [*other._parameters]
            for name in one._parameters:
                if getattr(one, name) is not None:
                    assert told(getattr(one, name)) == told(getattr(other, name)), (one, name)
        weights_of = [layer.weight for layer in ours if getattr(layer, "frozen", False)]
        inner = [tensor for weight in weights_of for tensor in plain_tensors(weight)]
        assert len({id(tensor) for tensor in inner}) == len(inner) > 0
        assert not any(
            torch._C._is_alias_of(one, other)
            for one, other in itertools.combinations([*weights_of, *inner], 2)
        )


def test_a_model_with_data_is_left_to_quanto():
    import torch

    torch.manual_seed(0)
    stack = model("qint8", device="cpu")
    stack[1] = model("qint8")[1]
    stack[4] = model("qint8")[4]
    expected = [
        layer.qweight.dequantize() if hasattr(layer, "qweight") and layer.qweight is not None else None
        for layer in stack
    ]
    frozen(stack)
    assert stack[1].weight.is_meta and stack[4].weight.is_meta
    for layer, weight in zip(stack, expected, strict=True):
        if weight is not None and not weight.is_meta:
            assert torch.equal(layer.weight.dequantize(), weight)
    before = [layer.weight for layer in stack if hasattr(layer, "qweight") and layer.frozen]
    frozen(stack)  # again
    for one, other in zip(
        before, [x.weight for x in stack if hasattr(x, "qweight") and x.frozen], strict=True
    ):
        assert told(one) == told(other)


def test_what_the_user_wrote_is_called_for_each_layer():
    """An optimizer, a class of layers, a weight that is no plain parameter."""
    import torch

    library = q.quanto()
    calls = []

    class Own(library.AbsmaxOptimizer):
        def optimize(self, *args, **kwargs):
            calls.append("optimize")
            return super().optimize(*args, **kwargs)

    frozen(model("qint8", optimizer=Own()))
    assert len(calls) == 12

    class Layer(library.QLinear):
        def freeze(self):
            calls.append("freeze")
            super().freeze()

    class Weight(torch.nn.Parameter):
        pass

    calls.clear()
    stack = torch.nn.Sequential(*(Layer(8, 8, weights=library.qint8, device="meta") for _ in range(3)))
    frozen(stack)
    assert calls == ["freeze"] * 3 and all(layer.frozen for layer in stack)
    stack = torch.nn.Sequential(
        *(library.QLinear(8, 8, weights=library.qint8, device="meta") for _ in range(3))
    )
    for layer in stack:
        layer.weight = Weight(layer.weight.detach())
    with counting() as count:
        frozen(stack)
    assert count.quantized == 3 and all(layer.frozen for layer in stack)


def test_one_layer_under_two_names_and_one_that_fails():
    """The layers before it are frozen, as without us; afterwards the rest can be."""
    library = q.quanto()
    stack = model("qint8")
    stack.append(stack[0])
    stack[5].optimizer = None
    with pytest.raises(TypeError):
        frozen(stack)
    assert stack[4].frozen and not stack[6].frozen
    stack[5].optimizer = library.AbsmaxOptimizer()
    frozen(stack)
    assert stack[-1] is stack[0] and all(stack[i].frozen for i in range(11))


@pytest.mark.parametrize("weights", q.QTYPES)
def test_data_comes_into_the_weights(weights):
    """A state dict is assigned, and the model made empty on a device and filled."""
    import torch

    source = frozen(model(weights, device="cpu"))
    state = source.state_dict()
    target = frozen(model(weights))
    target.load_state_dict(state, assign=True)
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor.float(), state[name].float()), name
    x = torch.randn(2, 256)
    assert torch.equal(target[1](x), source[1](x))
