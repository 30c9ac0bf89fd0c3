"""bnb-quant-state-meta: whole 4-bit models and pipelines, loaded from disk, under sequential offload."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, lora_models
from tests.fixes.callers import spelled
from tests.fixes.callers import without_index as without_index
from tests.fixes.test_bnb_linear4bit_reload import SHOWS as RELOAD
from tests.fixes.test_bnb_quant_state_meta import FIX_ID, SHOWS, offload, remove_hooks
from tests.rig import models

double = pytest.mark.parametrize("double_quant", [False, True], ids=["", "double"])


def flux(folder, double_quant=False):
    """A pipeline around a transformer that was quantized while loading."""
    diffusers = pytest.importorskip("diffusers")
    model = four_bit.load(diffusers.FluxTransformer2DModel, folder, bnb_4bit_use_double_quant=double_quant)
    return models.flux_pipeline(model)


@pytest.fixture
def saved_flux(tmp_path):
    pytest.importorskip("diffusers")
    return models.saved(models.flux_transformer(), tmp_path / "flux")


@double
@pytest.mark.usefixtures("without_index")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_pipeline_runs_three_times(gpu, saved_flux, double_quant):
    import torch

    here = gpu.devices[0]
    reference = models.call_flux(flux(saved_flux, double_quant), here, steps=2).cpu()
    before = gpu.allocated(here)
    pipeline = flux(saved_flux, double_quant)
    pipeline.enable_sequential_cpu_offload(device=spelled(here))
    for _ in range(3):
        assert torch.equal(models.call_flux(pipeline, here, steps=2).cpu(), reference)
        schedule = [part for part in vars(pipeline.scheduler).values() if isinstance(part, torch.Tensor)]
        left = gpu.allocated(here) - before - sum(part.nbytes for part in schedule if part.device == here)
        assert left == 0, f"{left} bytes stayed on {here}"


@double
@pytest.mark.parametrize("route", ["to", "to and back", "load_state_dict"])
@pytest.mark.defect(FIX_ID, shows=rf"{SHOWS}|{RELOAD}")
def test_a_loaded_model_that_is_on_the_gpu(gpu, saved_flux, tmp_path, double_quant, route):
    """From the GPU straight to meta: the weights of a loaded model do not know their layers."""
    import gc

    import torch

    here, there = gpu.pair
    first = flux(saved_flux, double_quant)
    reference = models.call_flux(first, here).cpu()
    models.saved(first.transformer, tmp_path / "quantized")
    kind = type(first.transformer)
    state = four_bit.state_of(first.transformer) if route == "load_state_dict" else {}
    del first
    gc.collect()
    before = gpu.allocated(here) + gpu.allocated(there)
    with four_bit.skip_for_other_reasons():
        model = kind.from_pretrained(tmp_path / "quantized", torch_dtype=torch.float16)
    model.to(here)
    if route == "to and back":
        model.to(there).to(here)
    if state:
        model.load_state_dict(state)
    del state
    offload(model, here)
    assert torch.equal(models.call_flux(models.flux_pipeline(model), here).cpu(), reference)
    gc.collect()
    left = gpu.allocated(here) + gpu.allocated(there) - before
    assert left == 0, f"{left} bytes stayed on the devices"


@double
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_what_travels_for_a_forward_pass(rig_devices, saved_flux, double_quant):
    """To the device every weight with its quant state, once; back nothing."""
    import torch

    here = rig_devices.devices[0]
    model = flux(saved_flux, double_quant).transformer
    needed = four_bit.bytes_of(model)
    inputs = {
        "hidden_states": torch.randn(1, 4, 64),
        "encoder_hidden_states": torch.randn(1, 8, 64),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    inputs = {name: tensor.to(here, torch.float16) for name, tensor in inputs.items()}
    offload(model, here)
    for _ in range(3):
        rig_devices.reset()
        with torch.no_grad():
            model(**inputs)
        traffic = rig_devices.traffic()
        assert (round(traffic.h2d / needed, 2), traffic.d2h) == (1.00, 0)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_pipeline_is_whole_again_without_its_hooks(gpu, saved_flux, tmp_path):
    import torch

    here = gpu.devices[0]
    original = flux(saved_flux)
    reference, saved = models.call_flux(original, here).cpu(), four_bit.state_of(original.transformer)
    pipeline = flux(saved_flux)
    pipeline.enable_sequential_cpu_offload(device=here)
    models.call_flux(pipeline, here)
    pipeline.remove_all_hooks()
    assert four_bit.differences(four_bit.state_of(pipeline.transformer), saved) == []
    pipeline.to(here)
    four_bit.assert_whole(pipeline.transformer, here)
    assert torch.equal(models.call_flux(pipeline, here).cpu(), reference)
    pipeline.transformer.save_pretrained(tmp_path / "again")
    again = models.flux_pipeline(
        type(pipeline.transformer).from_pretrained(tmp_path / "again", torch_dtype=torch.float16)
    )
    assert four_bit.differences(four_bit.state_of(again.transformer), saved) == []
    assert torch.equal(models.call_flux(again, here).cpu(), reference)


def lora(scale: float = 0.2) -> dict:
    """LoRA weights for two layers of the tiny transformer, as a file would hold them."""
    import torch

    generator = torch.Generator().manual_seed(3)
    layers = ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_k")
    return {
        f"transformer.{layer}.lora_{side}.weight": scale * torch.randn(shape, generator=generator)
        for layer in layers
        for side, shape in (("A", (4, 64)), ("B", (64, 4)))
    }


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_lora_comes_and_goes(gpu, saved_flux):
    """diffusers takes the hooks off, lets PEFT wrap the layers, and puts the hooks back on."""
    import torch

    pytest.importorskip("peft")
    lora_models.skip_where_flux_takes_no_lora(4)
    here = gpu.devices[0]
    reference = models.call_flux(flux(saved_flux), here).cpu()
    whole = flux(saved_flux)
    whole.load_lora_weights(lora())
    with_lora = models.call_flux(whole, here).cpu()
    assert not torch.equal(with_lora, reference)
    pipeline = flux(saved_flux)
    pipeline.enable_sequential_cpu_offload(device=here)
    for _ in range(2):
        assert torch.equal(models.call_flux(pipeline, here).cpu(), reference)
        pipeline.load_lora_weights(lora())
        assert torch.equal(models.call_flux(pipeline, here).cpu(), with_lora)
        assert torch.equal(models.call_flux(pipeline, here).cpu(), with_lora)
        pipeline.unload_lora_weights()
    assert torch.equal(models.call_flux(pipeline, here).cpu(), reference)


@double
@pytest.mark.parametrize("name", ["t5_encoder", "clip_text"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_text_encoder(gpu, tmp_path, name, double_quant):
    """Loaded by transformers, offloaded by accelerate, as a pipeline does it."""
    import torch

    here = gpu.devices[0]
    whole = getattr(models, name)()
    folder = models.saved(whole, tmp_path / name)
    tokens = torch.tensor([[2, 5, 6, 3]], device=here)

    def encode(model):
        with torch.no_grad():
            return model(tokens).last_hidden_state.cpu()

    original = four_bit.load(type(whole), folder, bnb_4bit_use_double_quant=double_quant)
    reference, saved = encode(original), four_bit.state_of(original)
    model = four_bit.load(type(whole), folder, bnb_4bit_use_double_quant=double_quant)
    del original
    with four_bit.skip_for_other_reasons():
        offload(model, here)
    for _ in range(3):
        assert torch.equal(encode(model), reference)
    remove_hooks(model)
    assert torch.equal(encode(model), reference)
    assert four_bit.differences(four_bit.state_of(model), saved) == []
