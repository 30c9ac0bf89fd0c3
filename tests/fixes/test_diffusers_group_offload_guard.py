"""A quantized model whose hooks only bring inputs is not offloaded: groups of it can be."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import LEAF, assert_left, net, offload

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
pytest.importorskip("bitsandbytes")
accelerate = pytest.importorskip("accelerate")

SHOWS = "already applying an alternative offloading strategy from Accelerate"


def dispatched(device):
    """A 4-bit model as ``from_pretrained`` leaves one where accelerate puts hooks on it."""
    model = net(lambda seed: four_bit.linear(device, seed=seed)).to(device)
    model.quantization_method = "bitsandbytes"
    hook = accelerate.hooks.AlignDevicesHook(execution_device=device, io_same_device=True)
    accelerate.hooks.add_hook_to_module(model, hook)
    return model


def run(model, device):
    with torch.no_grad():
        return model(four_bit.batch(device, 1)).cpu()


@pytest.mark.defect("diffusers-group-offload-guard", shows=SHOWS)
def test_a_model_that_was_only_loaded_is_accepted(gpu):
    offload(dispatched(gpu.devices[0]), gpu.devices[0], LEAF)


def test_its_inputs_go_where_the_groups_are(gpu):
    first, other = gpu.devices[0], gpu.devices[-1]
    expected = run(dispatched(first), first)
    before = gpu.allocated(first)
    model = dispatched(first)
    offload(model, other, LEAF)
    assert torch.equal(run(model, other), expected)
    if first != other:
        assert_left(gpu, first, before)


@pytest.mark.parametrize("spread", [False, True], ids=["offloaded", "spread"])
def test_other_models_are_refused_as_before(gpu, spread):
    first, second = gpu.pair
    model = net(lambda seed: four_bit.linear(first, seed=seed)).to(first)
    model.quantization_method = "bitsandbytes"
    for module, device in ((model.first, first), (model.blocks, second)):
        hook = accelerate.hooks.AlignDevicesHook(execution_device=device, io_same_device=True)
        hook.offload = not spread
        module._hf_hook = hook
    with pytest.raises(ValueError, match=SHOWS):
        offload(model, first, LEAF)


def test_models_that_are_not_quantized_are_refused_as_before(gpu):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook(execution_device="cpu"))
    with pytest.raises(ValueError, match=SHOWS):
        offload(model, gpu.devices[0], LEAF)
