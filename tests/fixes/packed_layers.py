"""Layers [FEATURES, FEATURES] whose weights are packed, of every kind that diffusers puts in the place of a Linear."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, four_bit
from tests.fixes.callers import assert_stays_exact, spelled
from tests.gate import unmet

FEATURES = four_bit.FEATURES


def eight_bit_linear(device, seed: int = 0):
    return eight_bit.linear(device, FEATURES, seed=seed)


def gguf_linear(device, seed: int = 0):
    import torch

    utils = pytest.importorskip("diffusers.quantizers.gguf.utils", reason="this diffusers has no GGUF")
    if not hasattr(utils, "GGUFLinear"):
        pytest.skip("this diffusers cannot load GGUF here")
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(seed)
    packed = gguf.quants.quantize(torch.randn(FEATURES, FEATURES).numpy(), gguf.GGMLQuantizationType.Q8_0)
    layer = utils.GGUFLinear(FEATURES, FEATURES, bias=True, compute_dtype=torch.float32)
    weight = torch.from_numpy(packed)
    layer.weight = utils.GGUFParameter(weight, quant_type=gguf.GGMLQuantizationType.Q8_0)
    layer.bias.data.normal_()
    return layer.to(device)


def stored_as_float16(device, seed: int = 0):
    """The bytes of a 4-bit layer in float16, as FSDP wants them (``bnb_4bit_quant_storage``)."""
    import torch

    return four_bit.linear(device, seed=seed, quant_storage=torch.float16)


def torchao_linear(device, seed: int = 0):
    """Not packed for torch: its weight says that it has a floating point type."""
    import torch

    quantization = pytest.importorskip("torchao.quantization")
    if unmet("torchao>=0.18"):
        pytest.skip("its Int8WeightOnlyConfig makes another tensor")
    torch.manual_seed(seed)
    layer = torch.nn.Linear(FEATURES, FEATURES)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer.to(device)


KINDS = pytest.mark.parametrize(
    "linear",
    [four_bit.linear, stored_as_float16, eight_bit_linear, gguf_linear],
    ids=["4-bit", "4-bit in float16", "8-bit", "gguf"],
)


def compute_alike(plain, layer) -> None:
    """Give a ``torch.nn.Linear`` the weight and the bias that a packed ``layer`` computes with."""
    import torch

    device = layer.weight.device
    dtype = torch.float16 if layer.weight.dtype == torch.int8 else torch.float32
    with torch.no_grad():
        plain.bias.copy_(layer(torch.zeros(1, FEATURES, device=device, dtype=dtype))[0])
        rows = layer(torch.eye(FEATURES, device=device, dtype=dtype))
        plain.weight.copy_((rows.float() - plain.bias).t())


def assert_computes_alike(linear, quantized, plain, given) -> None:
    """A module with a quantized layer gives, up to rounding, the output of ``plain``, and the same one again.

    Args:
        linear: made the layer; an 8-bit one computes in float16.
        quantized: the module.
        plain: the same with the weights that the layer computes with (`compute_alike`).
        given: the inputs, in float32.
    """
    import torch

    with torch.no_grad():
        expected = plain(*given)
        if linear is eight_bit_linear:
            quantized = quantized.half()
            given = [one.half() if one.is_floating_point() else one for one in given]
        out = quantized(*given)
        assert out.shape == expected.shape
        torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
        assert torch.equal(quantized(*given), out)


def assert_near(out, expected, bits: int) -> None:
    """The output of a model that was quantized to 4 or 8 bits, beside that of the plain one."""
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < {4: 0.3, 8: 0.05}[bits], f"the output differs by {error:.0%}"


def assert_exact_under_sequential_offload(gpu, build, run) -> None:
    """A module gives the same offloaded as on its device, also after an interruption, and leaves nothing there.

    Args:
        gpu: the fixture.
        build: makes the module on a device.
        run: gives its output on the CPU.
    """
    import torch
    from accelerate import cpu_offload

    device = gpu.devices[0]
    expected = run(build(device))
    before = gpu.allocated(device)
    offloaded = build(device).cpu()
    cpu_offload(offloaded, spelled(device))

    assert_stays_exact(gpu, device, lambda: run(offloaded), expected, before, torch.testing.assert_close)
