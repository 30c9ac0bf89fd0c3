"""Models quantized by torchao under group offloading."""

from __future__ import annotations

import pytest

from tests.fixes.callers import interrupt
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import (
    FEATURES,
    SHOWS,
    assert_can_be_moved,
    assert_exchanged_is_moved,
    assert_left,
    assert_works_in_every_mode,
    modes,
    net,
    offload,
)
from tests.fixes.torchao_models import devices_of

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

weights = pytest.mark.parametrize("weights", ["int8", "float8"])


def build(weights: str, device, seed: int = 0):
    """A small model with these weights, quantized on the CPU, on ``device``."""

    def linear(number):
        torch.manual_seed(seed + number)
        return torch.nn.Linear(FEATURES, FEATURES)

    model = net(linear).bfloat16()
    config = int8() if weights == "int8" else quantization.Float8WeightOnlyConfig()
    quantization.quantize_(model, config)
    return model.to(device)


def int8():
    """The newest form of int8 weights that this torchao has."""
    try:
        return quantization.Int8WeightOnlyConfig(version=2)
    except TypeError:  # before 0.15
        return quantization.Int8WeightOnlyConfig()


def run(model, device):
    inputs = torch.randn(32, FEATURES, generator=torch.Generator().manual_seed(7)).bfloat16()
    with torch.no_grad():
        return model(inputs.to(device)).cpu()


@pytest.mark.defect("diffusers-group-offload-torchao", shows=SHOWS)
@weights
@modes("leaf-low", "block-low")
def test_quantized_layers(gpu, weights, mode):
    assert_works(gpu, gpu.devices[0], weights, mode)


@weights
@modes()
def test_every_mode(gpu, weights, mode):
    assert_works(gpu, gpu.devices[-1], weights, mode)


def assert_works(gpu, device, weights, mode):
    expected = run(build(weights, device), device)
    before = gpu.allocated(device)
    model = build(weights, "cpu")
    offload(model, device, mode)
    for part in (0, 0, 0.3, 0.6, 0.9):
        if part:
            interrupt(lambda: run(model, device), part)
        for _ in range(2):
            assert torch.equal(run(model, device), expected)
            assert_left(gpu, device, before)


@weights
@modes("leaf", "leaf-stream", "block-low")
def test_in_inference_mode_and_out_of_it(gpu, weights, mode):
    device = gpu.devices[0]
    try:
        with torch.inference_mode():
            run(build(weights, device), device)
    except RuntimeError as error:  # torchao 0.15, not offloaded
        pytest.skip(f"torchao itself: {error}")
    assert_works_in_every_mode(
        gpu, device, lambda: build(weights, device), lambda model: run(model, device), mode
    )


def another_weight(model):
    """As a fused LoRA leaves it: another parameter in the same layer."""
    layer = model.blocks[0][0]
    layer.weight = torch.nn.Parameter(
        build("int8", layer.weight.device).blocks[1][2].weight.data, requires_grad=False
    )


def loaded(model):
    model.load_state_dict(build("int8", model.first.weight.device, seed=50).state_dict(), assign=True)


def one_inner_tensor_more(model):
    weight = model.blocks[0][0].weight
    weight.act_pre_scale = torch.full((FEATURES,), 2.0, dtype=torch.bfloat16, device=weight.qdata.device)


@pytest.mark.parametrize("exchange", [another_weight, loaded, one_inner_tensor_more])
@modes("leaf", "block", "leaf-stream", "block-low")
def test_what_is_exchanged_between_two_passes_is_moved(gpu, mode, exchange):
    device = gpu.devices[0]
    if exchange is one_inner_tensor_more and not hasattr(build("int8", "cpu").first.weight, "act_pre_scale"):
        pytest.skip("the weights of this torchao have no optional inner tensor")
    assert_exchanged_is_moved(
        gpu, device, lambda where: build("int8", where), lambda model: run(model, device), mode, exchange
    )


@weights
@modes("leaf-stream", "block-low")
def test_models_can_be_moved_when_the_hooks_are_off(gpu, weights, mode):
    assert_can_be_moved(gpu.pair, build(weights, gpu.pair[0]), run, mode, devices_of)


def test_disk_is_refused_in_a_sentence(gpu, tmp_path):
    with pytest.raises(ValueError, match="Tensor cannot be offloaded to disk"):
        offload(
            build("int8", "cpu"),
            gpu.devices[0],
            {"offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path)},
        )
