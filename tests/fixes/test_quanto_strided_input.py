"""quanto-strided-input: 8-bit weights of quanto take no input that is not contiguous."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_kernels
from tests.fixes import quanto_models as q

# Before the devices of the rig are there: quanto looks for GPUs when it is imported.
pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed", exc_type=ImportError)

FIX_ID = "quanto-strided-input"
SHOWS = r"view size is not compatible with input tensor's size and stride"


def strided(how: str, dtype=None, device="cpu", width: int = 256):
    """An input (..., width) that is not contiguous, and cannot be seen as one of two dimensions."""
    whole = q.inputs(dtype, width, rows=24, device=device)
    if how == "transposed":
        return whole.view(4, 6, width).transpose(0, 1)
    if how == "sliced":
        return whole.view(4, 6, width)[:, 2:]
    return whole.view(2, 3, 4, width).transpose(0, 2)


@pytest.mark.parametrize("how", ["transposed", "sliced", "four axes"])
@pytest.mark.parametrize("qtype", ["qint8", "qfloat8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.defect("quanto-strided-input", shows=SHOWS)
def test_the_output_is_that_of_a_contiguous_input(qtype, dtype, how):
    import torch

    dtype = getattr(torch, dtype)
    model, given = q.layers(qtype, dtype), strided(how, dtype)
    with torch.no_grad():
        output, expected = model(given), model(given.contiguous())
    assert output.shape == expected.shape == (*given.shape[:-1], 128)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("activations", ["qint8", "qfloat8"])
def test_quantized_activations(activations):
    """With qint8 the library's own product flattens the input, also with ``view`` in 0.2.5."""
    import torch

    library = q.quanto()
    model = q.plain_layers()
    library.quantize(model, weights=library.qint8, activations=getattr(library, activations))
    given = strided("transposed")
    with torch.no_grad(), library.Calibration():
        model(given.contiguous())
    library.freeze(model)
    with torch.no_grad():
        output, expected = model(given), model(given.contiguous())
    torch.testing.assert_close(output.dequantize(), expected.dequantize())


@pytest.mark.defect("quanto-strided-input", shows=SHOWS)
def test_the_weight_of_marlin(gpu):
    import torch

    packed, _, bias = quanto_kernels.marlin_weight(gpu.devices[0], in_features=256)
    given = strided("sliced", torch.float16, gpu.devices[0])
    with torch.no_grad():
        output = torch.nn.functional.linear(given, packed, bias)
        expected = torch.nn.functional.linear(given.contiguous(), packed, bias)
    assert torch.equal(output, expected)


@pytest.mark.defect("quanto-strided-input", shows=SHOWS)
def test_the_weight_of_tinygemm(monkeypatch):
    """Its kernel needs a GPU or another torch; PyTorch stands in."""
    from types import SimpleNamespace

    import torch

    q.quanto()
    from optimum.quanto.tensor.weights.tinygemm.qbits import TinyGemmQBitsLinearFunction

    for name in ("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"):
        monkeypatch.setattr(torch, name, lambda given, matrix, *others: given @ matrix.t(), raising=False)
    matrix, given = torch.randn(128, 256), strided("sliced")
    packed = SimpleNamespace(
        _data=SimpleNamespace(_data=matrix), _group_size=128, _scale_shift=torch.ones(1), shape=matrix.shape
    )
    context = SimpleNamespace(save_for_backward=lambda *tensors: None)
    output = TinyGemmQBitsLinearFunction.forward(context, given, packed, None)
    torch.testing.assert_close(output, given @ matrix.t(), rtol=1e-4, atol=1e-3)


@pytest.mark.defect("quanto-strided-input", shows=SHOWS)
def test_the_gradient_of_the_input():
    import torch

    model = q.layers("qint8").requires_grad_(False)
    gradients = []
    for whole in (False, True):
        given = strided("sliced").detach()
        given = (given.contiguous() if whole else given).requires_grad_(True)
        assert given.is_contiguous() == whole
        model(given).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients)


def test_what_is_saved_is_the_input():
    """No copy of it is kept for the backward pass, contiguous or not."""
    layer = q.layers("qint8")[0]
    for given in (q.inputs(rows=6), strided("sliced")):
        q.assert_saves_no_copy(layer, given)
