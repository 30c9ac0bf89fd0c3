"""bnb-linear8bit-bias, bnb-linear4bit-input-bias: a forward pass under autocast rounds the bias of a layer for good."""

from __future__ import annotations

import contextlib

import pytest

from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

EIGHT, FOUR = "bnb-linear8bit-bias", "bnb-linear4bit-input-bias"
SHOWS = "the bias became"
BITS = [
    pytest.param(8, marks=pytest.mark.defect(EIGHT, shows=SHOWS), id=EIGHT),
    pytest.param(4, marks=pytest.mark.defect(FOUR, shows=SHOWS, needs="bitsandbytes<0.50"), id=FOUR),
]
DTYPES = (torch.float16, torch.bfloat16)


def linear(bits: int, device):
    """A layer [64, 64] with a float32 bias, and its inputs."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 64)
    if bits == 8:
        layer = Linear8bitLt(64, 64, has_fp16_weights=False)
    else:
        layer = Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32)
    layer.load_state_dict(plain.state_dict())
    return layer.to(device), torch.randn(3, 64).to(device)


def assert_kept(layer, bias, values) -> None:
    assert layer.bias.dtype == torch.float32, f"the bias became {layer.bias.dtype}"
    assert layer.bias is bias
    assert torch.equal(bias, values)


@pytest.mark.parametrize("bits", BITS)
def test_a_pass_in_another_dtype(gpu, bits):
    for dtype in DTYPES:
        layer, x = linear(bits, gpu.devices[0])
        bias, values = layer.bias, layer.bias.detach().clone()
        x = x if bits == 4 else x.half()
        with torch.no_grad():
            before = layer(x.float())
            half = layer(x.to(dtype))
            assert_kept(layer, bias, values)
            assert torch.equal(layer(x.float()), before)
        assert half.dtype == dtype


@pytest.mark.parametrize("bits", [4, 8])
def test_the_numbers_are_upstreams(gpu, bits):
    """The same product as that of a layer whose bias has the dtype of the pass from the start."""
    for dtype in DTYPES:
        layer, x = linear(bits, gpu.devices[0])
        with torch.no_grad():
            output = layer(x.to(dtype))
            if bits == 8:
                layer.bias.data = layer.bias.data.to(dtype)
            assert torch.equal(layer(x.to(dtype)), output)


@pytest.mark.parametrize("bits", BITS[1:])
def test_without_a_compute_dtype(gpu, bits):
    """The default: layers compute in the dtype of their input."""
    layer, x = linear(bits, gpu.devices[0])
    layer.compute_dtype = None
    bias, values = layer.bias, layer.bias.detach().clone()
    for rows in (3, 1):
        with torch.no_grad():
            output = layer(x[:rows].half())
            assert_kept(layer, bias, values)
            plain = layer(x[:rows])
        assert output.dtype == torch.float16
        assert torch.allclose(output.float(), plain, atol=0.05)


@pytest.mark.parametrize("bits", BITS)
def test_a_call_that_fails(gpu, bits):
    layer, _ = linear(bits, gpu.devices[0])
    bias, values = layer.bias, layer.bias.detach().clone()
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        layer(torch.ones(3, 32, dtype=torch.bfloat16, device=gpu.devices[0]))
    assert_kept(layer, bias, values)


@pytest.mark.parametrize("bits", BITS)
def test_a_bias_that_learns(gpu, bits):
    """In steps that are too small for bfloat16."""
    layer, x = linear(bits, gpu.devices[0])
    bias, before = layer.bias.requires_grad_(True), layer.bias.detach().clone()
    optimizer = torch.optim.SGD([bias], lr=1e-6)
    for _ in range(3):
        layer(x.bfloat16()).float().sum().backward()
        optimizer.step()
    assert layer.bias.dtype == torch.float32, f"the bias became {layer.bias.dtype}"
    assert bias.grad is not None
    assert bias.grad.dtype == torch.float32
    assert torch.equal(bias.grad, torch.full_like(bias, 9))
    assert (bias != before).all()


@pytest.mark.parametrize("bits", BITS)
def test_a_model_under_autocast(gpu, tmp_path, bits):
    """As validation in the middle of training does it: the next output and the checkpoint are as before."""
    from diffusers import FluxTransformer2DModel

    here = gpu.devices[0]
    folder = models.saved(models.flux_transformer(), tmp_path)
    with four_bit.skip_for_other_reasons():
        model = models.load_quantized(FluxTransformer2DModel, folder, bits=bits, dtype=torch.float32)
    layer = next(part for part in model.modules() if "bit" in type(part).__name__ and part.bias is not None)
    bias, values = layer.bias, layer.bias.detach().clone()
    assert bias.dtype == torch.float32
    pipe = models.flux_pipeline(model)
    with torch.autocast(torch.device(here).type, torch.bfloat16), contextlib.suppress(NotImplementedError):
        models.call_flux(pipe, here)
    assert_kept(layer, bias, values)


def test_without_a_bias(gpu):
    for bits in (4, 8):
        layer, x = linear(bits, gpu.devices[0])
        layer.bias = None
        with torch.no_grad():
            assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_compiled():
    if sentence := unmet("bitsandbytes>=0.50"):
        pytest.skip(sentence)
    layer, x = linear(8, "cpu")
    x = x.bfloat16()
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, backend="eager")(x), expected)
    assert layer.bias.dtype == torch.float32
