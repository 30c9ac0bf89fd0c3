"""diffusers-lora-device-offloaded: set_lora_device of a sequentially offloaded pipeline fails."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, lora_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.fixes.offloaded import offload
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-lora-device-offloaded"
SHOWS = "Cannot copy out of meta tensor; no data!"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_on_plain_cpu():
    """``accelerate.cpu_offload`` really puts the weights on meta."""
    pipe = lora_models.load(models.flux_pipeline())
    expected = lora_models.run(pipe)
    offload(pipe.transformer)
    pipe.set_lora_device(["one", "two"], "cpu")
    assert lora_models.distance(lora_models.run(pipe), expected) == 0
    for name in ("one", "two"):
        pipe.set_lora_device(adapter_names=[name], device="cpu")
        pipe.set_adapters(name)
        lora_models.run(pipe)
    assert not any("to" in vars(layer) for layer in pipe.transformer.modules())


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_to_the_device_and_back(gpu):
    device = gpu.devices[-1]
    pipe = lora_models.load(models.flux_pipeline())
    pipe.transformer.to(device)
    expected = lora_models.run(pipe, device)
    pipe.to("cpu")
    before = gpu.allocated(device)

    def check(latents):
        assert lora_models.distance(latents, expected) == 0

    pipe.enable_sequential_cpu_offload(device=device)
    for place in (device, "cpu", spelled(device)):
        pipe.set_lora_device(["one", "two"], place)
        check(lora_models.run(pipe, device))
    assert_goes_on(lambda: lora_models.run(pipe, device), check)
    pipe.remove_all_hooks()
    assert gpu.allocated(device) <= before + 4096  # constants of the scheduler
    pipe.to("cpu")
    pipe.transformer.to(device)
    assert lora_models.distance(lora_models.run(pipe, device), expected) == 0


def test_a_component_that_is_not_offloaded_is_moved(gpu):
    device = gpu.devices[0]
    pipe = models.flux_pipeline(text_encoder=models.clip_text())
    lora_models.load(pipe, text=True)
    offload(pipe.transformer, device=device)
    pipe.set_lora_device(["one"], device)
    where = {
        name: parameter.device.type
        for part in (pipe.transformer, pipe.text_encoder)
        for name, parameter in part.named_parameters()
        if "lora_" in name and ".one." in name
    }
    assert set(where.values()) == {"meta", "cuda"}
    assert all((place == "cuda") == ("proj" in name and "to_" not in name) for name, place in where.items())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_transformer(gpu, tmp_path, bits):
    import torch
    from diffusers import FluxTransformer2DModel

    lora_models.skip_where_flux_takes_no_lora(bits)
    device = gpu.devices[0]
    models.saved(models.flux_transformer(), tmp_path)
    pipe = models.flux_pipeline(four_bit.load(FluxTransformer2DModel, tmp_path, bits=bits))
    lora_models.load(pipe)
    expected = lora_models.run(pipe, device, torch.float16)
    offload(pipe.transformer, device=device)
    pipe.set_lora_device(["one"], spelled(device))
    assert lora_models.distance(lora_models.run(pipe, device, torch.float16), expected) == 0


def test_dora(gpu):
    """Its magnitude is assigned anew upstream."""
    from peft import LoraConfig

    pipe = models.flux_pipeline()
    pipe.transformer.add_adapter(
        LoraConfig(r=4, target_modules=["to_q"], use_dora=True, init_lora_weights=False), adapter_name="one"
    )
    offload(pipe.transformer)
    before = dict(pipe.transformer.named_modules())
    pipe.set_lora_device(["one"], "cpu")
    assert {name: id(layer) for name, layer in pipe.transformer.named_modules()} == {
        name: id(layer) for name, layer in before.items()
    }


def test_an_error_of_upstream_leaves_nothing_behind():
    pipe = lora_models.load(models.flux_pipeline())
    offload(pipe.transformer)
    with pytest.raises(TypeError):
        pipe.set_lora_device(["one"])
    with pytest.raises(TypeError):
        pipe.set_lora_device(1, "cpu")
    assert not any("to" in vars(layer) for layer in pipe.transformer.modules())
