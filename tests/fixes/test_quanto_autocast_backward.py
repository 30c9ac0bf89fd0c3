"""quanto-autocast-backward: gradients through layers of quanto under autocast."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q

torch = pytest.importorskip("torch")

FIX_ID = "quanto-autocast-backward"
SHOWS = "to have the same dtype"
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


def gradient(model, dtype=torch.float32, autocast=torch.bfloat16, run=None):
    """Of the input, in its dtype."""
    inputs = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(True)
    with torch.autocast("cpu", autocast):
        output = model(inputs) if run is None else run(model, inputs)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output.float() * factors).sum().backward()
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
    assert model[0].bias.grad.dtype == torch.float16
    torch.testing.assert_close(model[0].bias.grad, plain[0].bias.grad, rtol=0.01, atol=0.01)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=0.05, atol=0.1)


def test_one_dtype_as_before():
    model, plain = layers("qfloat8", torch.bfloat16, bias=True)
    torch.testing.assert_close(
        gradient(model, torch.bfloat16), gradient(plain, torch.bfloat16), rtol=0.05, atol=0.05
    )
