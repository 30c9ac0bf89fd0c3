"""diffusers-meta-pipeline-device: a sequentially offloaded pipeline says that it is on meta."""

from __future__ import annotations

import logging

import pytest

from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import without_index as without_index
from tests.fixes.offloaded import SHOWS, longcat_image, offload, offload_sequentially
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-meta-pipeline-device"
CPU = "cpu"


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.37")
def test_longcat_image_encodes_a_prompt():
    """It sends the token ids to ``self.device``."""
    import torch

    with torch.no_grad():
        reference, pipe = longcat_image().encode_prompt("w1 w2")[0], longcat_image()
        offload(pipe.text_encoder)
        assert torch.equal(pipe.encode_prompt("w1 w2")[0], reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_tensor_comes_back_from_the_device_of_an_offloaded_pipeline():
    import torch

    pipe = models.flux_pipeline(text=True)
    offload_sequentially(pipe, CPU)
    assert torch.ones(3).to(pipe.device).sum().item() == 3


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_component_of_neither_library_counts_too(gpu):
    """A text encoder that brings a device property of its own, as those of third parties do."""
    import torch

    class Encoder(torch.nn.Linear):
        device = property(lambda self: self.weight.device)

    pipe = models.flux_pipeline(transformer=Encoder(64, 64))
    offload(pipe.transformer, device=gpu.devices[-1])
    assert torch.ones(3).to(pipe.device).cpu().sum().item() == 3
    assert pipe.device == gpu.devices[-1]


# ---------------------------------------------------------------------- what must stay as it was


def test_components_that_lie_somewhere_decide(gpu):
    """A text encoder offloaded by hand takes inputs from anywhere; the pipeline runs where the others are."""
    import torch

    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    first, second = gpu.devices[:2]
    reference = models.prompt_flux(models.flux_pipeline(text=True).to(second))
    for offloaded in ("vae", "text_encoder", "text_encoder_2"):
        pipe = models.flux_pipeline(text=True)
        for name, part in pipe.components.items():
            if name != offloaded and isinstance(part, torch.nn.Module):
                part.to(second)
        offload(getattr(pipe, offloaded), device=first)
        assert pipe.device == second
    # _execution_device asks the hook of the first component, here and upstream; this one is never the first.
    assert pipe._execution_device == second
    assert torch.equal(models.prompt_flux(pipe), reference)


def test_components_on_the_cpu_decide_too(gpu):
    pipe = models.flux_pipeline(text=True)
    offload(pipe.transformer, device=gpu.devices[0])
    assert pipe.device.type == CPU


def test_pipelines_that_nothing_holds():
    import torch

    assert models.flux_pipeline(text=True).device.type == CPU
    with torch.device("meta"):
        assert models.flux_pipeline().device.type == "meta"


def test_ways_into_and_out_of_offloading(gpu):
    """Every switch works as it did, and each time a run gives the same latents."""
    import torch

    device = gpu.devices[-1]
    reference = models.prompt_flux(models.flux_pipeline(text=True).to(device))
    pipe = models.flux_pipeline(text=True)

    def check(expected):
        assert pipe.device == torch.device(expected)
        assert pipe._execution_device == device
        assert torch.equal(models.prompt_flux(pipe), reference)

    for _ in range(2):
        pipe.enable_sequential_cpu_offload(device=device)
        check(device)
    with pytest.raises(ValueError, match="activated sequential model offloading"):
        pipe.to(device)
    pipe.enable_model_cpu_offload(device=device)
    check(CPU)
    check(CPU)  # the hooks were put anew after the run
    pipe.enable_sequential_cpu_offload(device=device)
    check(device)
    pipe.remove_all_hooks()
    assert pipe.device == pipe._execution_device == torch.device(CPU)
    pipe.to(device)
    check(device)


@pytest.mark.usefixtures("without_index")
def test_without_an_index_interrupted_and_in_inference_mode(gpu):
    import torch

    device = gpu.devices[0]
    reference = models.prompt_flux(models.flux_pipeline(text=True).to(device))
    pipe = models.flux_pipeline(text=True)
    offload_sequentially(pipe, device)

    def check(latents):
        assert torch.equal(latents, reference)
        assert torch.ones(3).to(pipe.device).device == device

    assert_goes_on(lambda: models.prompt_flux(pipe), check)


@pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="there was no group offloading before")
def test_group_offloading_keeps_its_own_answer(gpu):
    pipe = models.flux_pipeline()
    pipe.transformer.enable_group_offload(onload_device=gpu.devices[0], offload_type="leaf_level")
    assert pipe.device == pipe._execution_device == gpu.devices[0]


@pytest.mark.skipif(bool(unmet("peft>=0.17")), reason="peft is not installed")
def test_a_lora_is_loaded_into_an_offloaded_pipeline(gpu):
    """diffusers takes the hooks away, moves the text encoder to its own device, and puts the hooks back."""
    import torch

    device = gpu.devices[0]
    lora = lora_of(models.flux_pipeline(text=True))
    plain = models.flux_pipeline(text=True).to(device)
    without = models.prompt_flux(plain)
    plain.load_lora_weights(dict(lora))
    reference = models.prompt_flux(plain)
    assert not torch.equal(reference, without)
    pipe = models.flux_pipeline(text=True)
    pipe.enable_sequential_cpu_offload(device=device)
    pipe.load_lora_weights(dict(lora))
    assert pipe.device == pipe._execution_device == device
    assert torch.equal(models.prompt_flux(pipe), reference)
    pipe.unload_lora_weights()
    assert torch.equal(models.prompt_flux(pipe), without)


def test_the_warning_about_float16_on_the_cpu(gpu, caplog):
    import torch

    logging.getLogger("diffusers").addHandler(caplog.handler)
    try:
        pipe = models.flux_pipeline(text=True).to(torch.float16)
        pipe.enable_sequential_cpu_offload(device=gpu.devices[0])
        assert "float16" not in caplog.text
        pipe.remove_all_hooks()
        pipe.to(CPU)
        assert "float16" in caplog.text
    finally:
        logging.getLogger("diffusers").removeHandler(caplog.handler)


def test_the_patch_can_be_taken_back():
    import diffusers_quantfix

    pipe = models.flux_pipeline(text=True)
    offload_sequentially(pipe, CPU)
    ids = (FIX_ID, "diffusers-meta-component-device", "transformers-meta-component-device")
    diffusers_quantfix.revert(*ids)
    try:
        assert pipe.device.type == "meta"
        assert pipe._execution_device.type == CPU
    finally:
        diffusers_quantfix.apply(*ids)
    assert pipe.device.type == CPU
    assert "torch.device" in type(pipe).device.__doc__


def lora_of(pipe):
    """A LoRA of rank 2 for one layer of the transformer and of the first text encoder."""
    import torch

    generator = torch.Generator().manual_seed(3)

    def pair(prefix, layer):
        rows, columns = layer.weight.shape
        return {
            f"{prefix}.lora_A.weight": torch.randn(2, columns, generator=generator),
            f"{prefix}.lora_B.weight": torch.randn(rows, 2, generator=generator),
        }

    block = pipe.transformer.transformer_blocks[0].attn.to_q
    names = dict(pipe.text_encoder.named_modules())
    inner = next(name for name in names if name.endswith("layers.0.self_attn.q_proj"))
    return pair("transformer.transformer_blocks.0.attn.to_q", block) | pair(
        f"text_encoder.{inner}", names[inner]
    )
