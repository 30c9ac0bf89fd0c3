"""bitsandbytes computes on the devices what its quantized weights say."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")
bnb = pytest.importorskip("bitsandbytes")

HAS_CPU_KERNELS = importlib.util.find_spec("bitsandbytes._ops") is not None  # 0.46+


def _linear_4bit(device, quant_type="nf4", double_quant=False):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        128, 64, quant_type=quant_type, compress_statistics=double_quant, compute_dtype=torch.float16
    )
    return layer.to(device).requires_grad_(False)


@pytest.mark.parametrize("double_quant", [False, True], ids=["", "double"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_4bit_layer_multiplies_by_its_dequantized_weight(gpu, quant_type, double_quant):
    device = gpu.devices[-1]
    layer = _linear_4bit(device, quant_type, double_quant)
    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert weight.device == device
    for batch in (1, 5):  # one row takes the gemv kernel
        x = torch.randn(batch, 128, device=device, dtype=torch.float16)
        result = layer(x)
        assert result.device == device
        expected = torch.nn.functional.linear(x.float(), weight.float(), layer.bias.float())
        torch.testing.assert_close(result.float(), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4bit_quantization_is_close(gpu, quant_type):
    torch.manual_seed(0)
    source = torch.randn(64, 128)
    packed, state = bnb.functional.quantize_4bit(source.to(gpu.devices[-1]), quant_type=quant_type)
    back = bnb.functional.dequantize_4bit(packed, state).cpu()
    assert torch.nn.functional.cosine_similarity(back.flatten(), source.flatten(), dim=0) > 0.98


@pytest.mark.skipif(not HAS_CPU_KERNELS, reason="bitsandbytes < 0.46 has no CPU kernels to compare with")
def test_nf4_bytes_equal_the_cpu_kernels(gpu):
    torch.manual_seed(0)
    source = torch.randn(64, 128, dtype=torch.float16)
    packed, state = bnb.functional.quantize_4bit(source, quant_type="nf4")
    on_device, device_state = bnb.functional.quantize_4bit(source.to(gpu.devices[-1]), quant_type="nf4")
    assert torch.equal(on_device.cpu(), packed)
    torch.testing.assert_close(device_state.absmax.cpu(), state.absmax, rtol=0, atol=0)


@pytest.mark.skipif(not HAS_CPU_KERNELS, reason="bitsandbytes < 0.46 has no CPU kernels to compare with")
def test_the_stand_in_codec_equals_the_cpu_kernels():
    from tests.rig import blockwise

    torch.manual_seed(0)
    source = torch.randn(4096)
    packed, state = bnb.functional.quantize_4bit(source, quant_type="nf4", blocksize=64)
    indices, absmax = blockwise.quantize(source, blockwise.CODES["nf4"], 64)
    assert torch.equal(blockwise.pack(indices), packed.flatten())
    assert torch.equal(absmax, state.absmax)


@pytest.mark.parametrize("outliers", [False, True], ids=["", "outliers"])
def test_an_8bit_layer_multiplies_by_its_dequantized_weight(gpu, outliers):
    device = gpu.devices[-1]
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False, threshold=6.0)
    source, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    layer = layer.to(device).half()
    assert layer.weight.dtype == torch.int8
    x = torch.randn(5, 128)
    if outliers:
        x[:, 7] = 40.0
    expected = torch.nn.functional.linear(x, source, bias)
    for _ in range(2):
        result = layer(x.to(device, torch.float16))
        assert result.device == device
        torch.testing.assert_close(result.float().cpu(), expected, rtol=0.02, atol=0.05)


def test_only_results_count_as_allocated(rig_devices):
    layer = _linear_4bit("cuda:1")
    x = torch.randn(1, 128, device="cuda:1", dtype=torch.float16)
    rig_devices.reset()
    before = rig_devices.allocated("cuda:1")
    layer(x)
    # the result, the bias in the compute dtype and their sum; the weight is not unpacked for one row
    assert rig_devices.peak("cuda:1") - before <= 4 * 64 * 2
    assert rig_devices.traffic().h2d == 0


def test_a_forward_with_parts_on_another_device_raises(rig_devices):
    layer = _linear_4bit("cuda:1")
    layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.to("cuda:0")
    with pytest.raises((RuntimeError, TypeError), match=r"same device|same GPU"):
        layer(torch.randn(1, 128, device="cuda:1", dtype=torch.float16))
