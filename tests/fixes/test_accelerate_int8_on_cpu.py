"""accelerate-int8-on-cpu: an 8-bit weight goes to the CPU without a GPU."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on

FIX_ID = "accelerate-int8-on-cpu"
SHOWS = r"accelerator device|not compiled with CUDA|NVIDIA driver|No CUDA GPUs"


def layer():
    import torch
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    return Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False).to("cpu").eval()


def run(model):
    import torch

    with torch.no_grad():
        return model(torch.linspace(-1, 1, 128).view(2, 64))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.46")
def test_offload_to_where_it_runs():
    import torch
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, over which the weights go")
    model = torch.nn.Sequential(layer())
    reference = run(torch.nn.Sequential(layer()))
    cpu_offload(model, "cpu")

    def check(output):
        assert torch.equal(output, reference)

    check(run(model))
    assert_goes_on(lambda: run(model), check)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(run(model), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS + "|bytes went over the GPU", needs="bitsandbytes>=0.46")
def test_nothing_goes_over_the_gpu(gpu):
    import torch
    from accelerate.utils import set_module_tensor_to_device

    model = layer()
    value, scale = model.weight.data.clone(), model.weight.SCB.clone()
    gpu.reset()
    set_module_tensor_to_device(model, "weight", "cpu", value=value, fp16_statistics=scale)
    assert gpu.traffic().h2d == 0, f"{gpu.traffic().h2d} bytes went over the GPU"
    assert torch.equal(model.weight.data, value) and torch.equal(model.weight.SCB, scale)


def test_a_wrong_name_is_answered_by_upstream():
    import torch
    from accelerate.utils import set_module_tensor_to_device

    with pytest.raises((ValueError, AttributeError)):
        set_module_tensor_to_device(torch.nn.Linear(2, 2), "nothing", "cpu", value=torch.zeros(1))
    with pytest.raises((ValueError, AttributeError)):
        set_module_tensor_to_device(torch.nn.Linear(2, 2), "no.weight", "cpu", value=torch.zeros(1))
