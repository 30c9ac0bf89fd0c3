"""bnb-int8-requantize: ``Int8Params.to`` quantizes int8 data once more, and leaves CB and SCB where they were."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit

FIX_ID = "bnb-int8-requantize"


@pytest.mark.parametrize("call", ["to", "cuda"])
@pytest.mark.defect(
    FIX_ID, shows="the scales are lost|a companion is on|must be a floating point|not implemented"
)
def test_a_parameter_goes_there_and_back(gpu, call):
    import torch

    here = gpu.devices[0]
    weight = eight_bit.linear(here).weight
    scales, data = weight.SCB.cpu(), weight.data.cpu()
    away = weight.to("cpu")
    assert_companions(away, "cpu")
    back = away.to(here) if call == "to" else away.cuda(here)
    assert_companions(back, here)
    assert torch.equal(back.data.cpu(), data)
    assert torch.equal(back.SCB.cpu(), scales), "the scales are lost"


@pytest.mark.defect(FIX_ID, shows="the peak is")
def test_the_way_to_the_gpu_takes_the_weight_once(gpu):
    import bitsandbytes.nn
    import torch

    here = gpu.devices[0]
    data = torch.randint(-127, 128, (256, 256), dtype=torch.int8)
    gpu.reset()
    weight = bitsandbytes.nn.Int8Params(data, requires_grad=False).to(here)
    assert gpu.peak(here) == data.nbytes, f"the peak is {gpu.peak(here)} bytes instead of {data.nbytes}"
    assert torch.equal(weight.data.cpu(), data)


def test_a_weight_in_16_bits_is_still_quantized(gpu):
    import bitsandbytes.nn
    import torch

    here = gpu.devices[0]
    weight = bitsandbytes.nn.Int8Params(torch.randn(64, 64).half(), requires_grad=False).to(here)
    assert weight.dtype == torch.int8
    assert_companions(weight, here)


def assert_companions(weight, device) -> None:
    import torch

    assert type(weight).__name__ == "Int8Params"
    for name in ("CB", "SCB"):
        at = getattr(weight, name).device
        assert at == torch.device(device), f"a companion is on {at}: {name}"
    assert weight.CB.data_ptr() == weight.data_ptr()
