"""quanto-marlin-bias: the Marlin linear function of float8 weights loses the bias."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_kernels
from tests.fixes import quanto_models as q

FIX_ID = "quanto-marlin-bias"


def linear(input, weight, bias=None):
    import torch

    with torch.no_grad():
        return torch.nn.functional.linear(input, weight, bias)


@pytest.mark.defect(FIX_ID, shows=r"the bias is lost: off by")
def test_the_bias_is_added(gpu):
    """Against the plain path; the biases are about 5 where the products are about 4."""
    import torch

    q.quanto()
    device = gpu.devices[0]
    packed, plain, bias = quanto_kernels.marlin_weight(device)
    assert type(packed).__name__ == "MarlinF8QBytesTensor"
    given = q.inputs(torch.float16, 64, device=device)
    assert q.error(linear(given, packed), linear(given, plain)) < 0.005, (
        "the stand-in multiplies as it should"
    )
    off = q.error(linear(given, packed, bias), linear(given, plain, bias))
    assert off < 0.005, f"the bias is lost: off by {off} of the greatest output"


@pytest.mark.defect(FIX_ID, shows=r"the kernel takes half precision|expected|scalar type|float16")
def test_activations_in_float32(gpu):
    import torch

    q.quanto()
    device = gpu.devices[0]
    packed, plain, bias = quanto_kernels.marlin_weight(device)
    given = q.inputs(torch.float32, 64, device=device)
    output = linear(given, packed, bias)
    assert output.dtype == linear(given, plain, bias).dtype == torch.float16
    assert q.error(output, linear(given, plain, bias)) < 0.005


def test_three_dimensions_and_no_bias(gpu):
    import torch

    q.quanto()
    device = gpu.devices[0]
    packed, plain, bias = quanto_kernels.marlin_weight(device, out_features=64, in_features=128)
    given = q.inputs(torch.float16, 128, 6, device=device).reshape(2, 3, 128)
    for with_bias in (bias, None):
        output = linear(given, packed, with_bias)
        assert output.shape == (2, 3, 64)
        assert q.error(output, linear(given, plain, with_bias)) < 0.005


def test_packed_data_comes_back_exactly(gpu):
    """What Marlin has packed moves to the CPU, into a state dict and back as the plain weight that it was."""
    import torch

    q.quanto()
    device = gpu.devices[0]
    packed, plain, _ = quanto_kernels.marlin_weight(device)
    moved = packed.to("cpu")
    assert type(moved).__name__ == "WeightQBytesTensor"
    assert torch.equal(moved.dequantize(), plain.to("cpu").dequantize())


def test_the_gradient_flows(gpu):
    """To the input and to the bias."""
    import torch

    q.quanto()
    device = gpu.devices[0]
    packed, plain, bias = quanto_kernels.marlin_weight(device)
    gradients = []
    for weight in (packed, plain):
        given = q.inputs(torch.float16, 64, device=device).requires_grad_(True)
        own = bias.clone().requires_grad_(True)
        torch.nn.functional.linear(given, weight, own).sum().backward()
        gradients.append((given.grad, own.grad))
    assert q.error(gradients[0][0], gradients[1][0]) < 0.005
    assert torch.equal(gradients[0][1], gradients[1][1])
