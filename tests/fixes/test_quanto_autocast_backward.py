"""quanto-autocast-backward: gradients through layers of quanto under autocast."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q

torch = pytest.importorskip("torch")

FIX_ID = "quanto-autocast-backward"
SHOWS = "to have the same dtype"
INSIDE = "The dtype of a .*Tensor cannot be changed"
QTYPES = ("qint8", "qfloat8")


def layers(qtype: str, dtype, bias: bool):
    """A quantized layer [64, 64], and one that computes the same."""
    quanto = q.quanto()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=bias)).to(dtype)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=bias)).to(dtype)
    model.load_state_dict(plain.state_dict())
    quanto.quantize(model, weights=getattr(quanto, qtype))
    quanto.freeze(model)
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight.dequantize())
    return model.requires_grad_(False), plain.requires_grad_(False)


def gradient(model, dtype=torch.float32, autocast=torch.bfloat16, run=None, scale=1.0, inside=False):
    """Of the input, in its dtype; the backward pass ``inside`` autocast or after it."""
    inputs = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(True)
    with torch.autocast("cpu", autocast):
        output = model(inputs) if run is None else run(model, inputs)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", autocast, enabled=inside):
        (output.float() * factors * scale).sum().backward()
    return inputs.grad


@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_layer_in_float32(qtype):
    model, plain = layers(qtype, torch.float32, bias=False)
    found = gradient(model)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gradient(plain), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_another_half(bias):
    model, plain = layers("qfloat8", torch.float16, bias)
    torch.testing.assert_close(gradient(model), gradient(plain), rtol=0.05, atol=0.05)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_under_a_checkpoint():
    """Which returns saved tensors once."""
    from torch.utils.checkpoint import checkpoint

    model, _ = layers("qfloat8", torch.float32, bias=False)
    again = gradient(model, run=lambda model, inputs: checkpoint(model, inputs, use_reentrant=False))
    assert torch.equal(again, gradient(model))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_weight_and_a_bias_that_learn():
    """The bias in full precision."""
    model, plain = layers("qfloat8", torch.float16, bias=True)
    for one in (model, plain):
        one.requires_grad_(True)
        gradient(one)
    assert model[0].bias.grad.dtype == model[0].weight.grad.dtype == torch.float16
    torch.testing.assert_close(model[0].bias.grad, plain[0].bias.grad, rtol=0.01, atol=0.01)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_small_gradients(dtype):
    """Before: they were zeros in float16."""
    model, plain = layers("qfloat8", dtype, bias=False)
    found, expected = gradient(model, scale=1e-9), gradient(plain, scale=1e-9)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-11)


@pytest.mark.parametrize("qtype", ["qfloat8", "qint4"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.defect(FIX_ID, shows=INSIDE)
def test_inside_autocast(qtype, bias):
    model, plain = layers(qtype, torch.float32, bias)
    found = gradient(model, inside=True)
    torch.testing.assert_close(found, gradient(plain, inside=True), rtol=0.05, atol=0.05)


@pytest.mark.defect(FIX_ID, shows=INSIDE)
def test_what_learns_inside_autocast():
    model, plain = layers("qfloat8", torch.float32, bias=True)
    for one in (model, plain):
        one.requires_grad_(True)
        gradient(one, inside=True)
    for found, expected in zip(model[0].parameters(), plain[0].parameters(), strict=True):
        assert found.grad.dtype == torch.float32
        torch.testing.assert_close(found.grad, expected.grad, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.defect(FIX_ID, shows=INSIDE)
def test_compiled(qtype):
    """The backward pass is traced under autocast."""
    model, plain = layers(qtype, torch.float32, bias=False)
    torch._dynamo.reset()
    found = gradient(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, gradient(plain), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bias", [False, True])
def test_the_layers_input_is_not_copied(bias):
    """No weight learns."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if "_to_copy" in str(operation) and args[0].data_ptr() == taken.data_ptr():
                copied.append(operation)
            return operation(*args, **kwargs or {})

    model, _ = layers("qfloat8", torch.float32, bias)
    taken, copied = torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True), []
    with torch.autocast("cpu", torch.bfloat16):
        output = model(taken)
    with Copies():
        output.float().sum().backward()
    assert taken.grad is not None and not copied


def test_on_meta():
    """Which has no autocast."""
    q.quanto()
    from optimum.quanto.tensor.function import QuantizedLinearFunction

    from diffusers_quantfix.weights.quanto_backward import BackwardContext

    context = BackwardContext(torch.ones(3, 4, device="meta"), torch.ones(2, 4, device="meta"), (True,) * 3)
    of_input, of_weight, of_bias = QuantizedLinearFunction.backward(context, torch.ones(3, 2, device="meta"))
    assert (of_input.shape, of_weight.shape, of_bias.shape) == ((3, 4), (2, 4), (2,))


def test_one_dtype_as_before():
    model, plain = layers("qfloat8", torch.bfloat16, bias=True)
    torch.testing.assert_close(
        gradient(model, torch.bfloat16), gradient(plain, torch.bfloat16), rtol=0.05, atol=0.05
    )
