"""bnb-int8-reload: ``load_state_dict`` of an 8-bit layer fails after its first forward pass."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit

FIX_ID = "bnb-int8-reload"
SHOWS = "Loading a quantized checkpoint into non-quantized Linear8bitLt"


def state_of(model) -> dict:
    return {
        name: value.clone() if hasattr(value, "clone") else value
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("source_ran", [False, True], ids=["fresh", "used"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_that_has_run_takes_another_checkpoint(gpu, source_ran):
    import torch

    here = gpu.devices[0]
    source = torch.nn.Sequential(eight_bit.linear(here, seed=3), eight_bit.linear(here, seed=4))
    reference = eight_bit.run(source, here)
    if not source_ran:
        source = torch.nn.Sequential(eight_bit.linear(here, seed=3), eight_bit.linear(here, seed=4))
    model = torch.nn.Sequential(eight_bit.linear(here, seed=1), eight_bit.linear(here, seed=2))
    eight_bit.run(model, here)
    before = gpu.allocated(here)
    model.load_state_dict(state_of(source))
    assert gpu.allocated(here) <= before
    eight_bit.assert_whole(model, here)
    for _ in range(2):
        assert torch.equal(eight_bit.run(model, here), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_on_a_machine_without_gpu():
    import torch

    eight_bit.skip_without_cpu_kernels()
    source, model = eight_bit.linear("cpu", seed=1), eight_bit.linear("cpu", seed=2)
    inputs = eight_bit.batch("cpu").float()
    with torch.no_grad():
        reference = source.float()(inputs)
        model.float()(inputs)
        model.load_state_dict(source.state_dict())
        assert torch.equal(model(inputs), reference)


@pytest.mark.parametrize("place", ["the GPU", "the CPU"])
def test_a_load_that_has_nothing_for_the_layer_leaves_it_alone(gpu, place):
    """As PEFT loads a LoRA: through the whole model, whose 8-bit layers may rest on the CPU."""
    import torch

    here = gpu.devices[0]
    model = torch.nn.Sequential(eight_bit.linear(here), torch.nn.Linear(64, 64, dtype=torch.float16))
    model[1].to(here)
    eight_bit.run(model, here)
    if place == "the CPU":
        model.to("cpu")
    held = {name: tensor.clone() for name, tensor in model[1].state_dict().items()}
    layer, bytes_ = model[0], model[0].weight.data
    companions = dict(vars(layer.state))
    model.load_state_dict({f"1.{name}": tensor + 1 for name, tensor in held.items()}, strict=False)
    assert torch.equal(model[1].bias, held["bias"] + 1)
    assert layer.weight.data.data_ptr() == bytes_.data_ptr()
    assert all(vars(layer.state)[name] is value for name, value in companions.items())


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_that_rests_on_the_cpu(gpu):
    import torch

    here = gpu.devices[0]
    source, model = eight_bit.linear(here, seed=3), eight_bit.linear(here, seed=1)
    saved, reference = state_of(source), eight_bit.run(source, here)
    eight_bit.run(model, here)
    model.to("cpu")
    model.load_state_dict(saved)
    assert torch.equal(eight_bit.run(model.to(here), here), reference)


def test_a_layer_that_was_never_quantized_still_says_so():
    import torch
    from bitsandbytes.nn import Linear8bitLt

    layer = Linear8bitLt(64, 64, has_fp16_weights=False)
    state = {"weight": torch.zeros(64, 64, dtype=torch.int8), "bias": torch.zeros(64), "SCB": torch.ones(64)}
    with pytest.raises(RuntimeError, match=SHOWS):
        layer.load_state_dict(state)
