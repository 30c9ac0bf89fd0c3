"""quanto-weight-gradient: the gradient of a weight of quanto needs contiguous tensors."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q
from tests.gate import unmet

FIX_ID = "quanto-weight-gradient"
SHOWS = r"view size is not compatible with input tensor's size and stride"


def gradients(model, weight, transposed: bool = True):
    """Those of the input and of the weight of the first layer; the gradient of the output is transposed."""
    import torch

    inputs = q.inputs(rows=6).view(2, 3, -1)
    if transposed:
        inputs = inputs.transpose(0, 1)
    inputs = inputs.detach().requires_grad_(True)
    output = model(inputs)
    factor = torch.arange(float(output.numel())).view(output.shape[1], output.shape[0], -1).transpose(0, 1)
    output.backward(factor)
    return inputs.grad, weight.grad


@pytest.mark.defect("quanto-weight-gradient", shows=SHOWS)
@pytest.mark.parametrize("qtype", ["qint8", "qfloat8"])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_gradients_are_those_of_the_dequantized_layer(qtype, transposed):
    import torch

    model = q.layers(qtype)[:1]
    weight = model[0].weight.requires_grad_(True)
    plain = torch.nn.Linear(256, 256, dtype=torch.float32)
    plain.weight = torch.nn.Parameter(weight.dequantize().detach())
    plain.bias = torch.nn.Parameter(model[0].bias.detach())
    expected = gradients(plain, plain.weight, transposed)
    found = gradients(model, weight, transposed)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)


def test_a_frozen_weight_gets_no_gradient():
    model = q.layers("qint8")[:1]
    weight = model[0].weight.requires_grad_(False)
    of_input, of_weight = gradients(model, weight, transposed=False)
    assert of_input is not None
    assert of_weight is None


def test_compiled():
    """Gradients pass through a frozen weight, as in a training of an adapter."""
    import torch

    if sentence := unmet("torch>=2.8") or unmet("optimum-quanto>=0.2.6"):
        pytest.skip(sentence)
    model, inputs = q.layers("qint8"), q.inputs(rows=6)

    def gradient(run):
        given = inputs.detach().requires_grad_(True)
        run(given).sum().backward()
        return given.grad

    torch._dynamo.reset()
    assert torch.equal(gradient(torch.compile(model, backend="aot_eager")), gradient(model))
