"""bnb-current-device: 4-bit kernels leave the current CUDA device changed."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit

FIX_ID = "bnb-current-device"
CHANGED = "the current device was cuda:0, it is cuda:1 now"


def second(gpu):
    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    return gpu.devices[1]


@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=CHANGED)
def test_quantizing(gpu, quant_type, double_quant):
    there = second(gpu)
    with four_bit.current_device_kept():
        four_bit.linear(there, quant_type, double_quant)


@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=CHANGED)
def test_running(gpu, quant_type, double_quant):
    import torch

    there = second(gpu)
    layer = four_bit.linear(there, quant_type, double_quant)
    torch.cuda.set_device(0)
    with four_bit.current_device_kept():
        four_bit.run(layer, there)


@pytest.mark.parametrize("name", ["quantize_blockwise", "dequantize_blockwise"])
@pytest.mark.defect(FIX_ID, shows=CHANGED)
def test_blockwise(gpu, name):
    import torch
    from bitsandbytes import functional

    there = second(gpu)
    values = torch.randn(4096, device=there)
    quantized, state = functional.quantize_blockwise(values)
    torch.cuda.set_device(0)
    with four_bit.current_device_kept():
        if name == "quantize_blockwise":
            functional.quantize_blockwise(values)
        else:
            functional.dequantize_blockwise(quantized, state)


@pytest.mark.defect(FIX_ID, shows=CHANGED)
def test_after_an_error(gpu):
    """One row on cuda:1, ``code`` on cuda:0: an error, as it should be, and the current device as it was."""
    import torch

    there = second(gpu)
    layer = four_bit.linear(there)
    layer.weight.quant_state.code = layer.weight.quant_state.code.to(gpu.devices[0])
    torch.cuda.set_device(0)
    with four_bit.current_device_kept():
        try:
            four_bit.run(layer, there, rows=1)
        except (TypeError, RuntimeError) as error:
            assert "same" in str(error)


def test_another_current_device_is_kept_too(gpu):
    """Not cuda:0 is the right one, but the one that it was."""
    import torch

    there = second(gpu)
    torch.cuda.set_device(1)
    with four_bit.current_device_kept():
        four_bit.run(four_bit.linear(gpu.devices[0]), gpu.devices[0])
    assert torch.cuda.current_device() == there.index


def test_the_cpu_needs_no_current_device():
    import torch
    from bitsandbytes import functional

    values = torch.linspace(-1, 1, 4096)
    try:
        quantized, state = functional.quantize_blockwise(values)
    except (NameError, AttributeError, RuntimeError) as error:
        assert "CUDA" not in str(error)
        pytest.skip(f"this release cannot quantize on the CPU here: {error}")
    assert torch.allclose(functional.dequantize_blockwise(quantized, state), values, atol=0.02)
