"""diffusers-memory-footprint: the size of models with quanto or torchao weights."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models.footprint import held
from tests.fixes import gguf_models
from tests.fixes import quanto_models as q
from tests.fixes import torchao_models as ao
from tests.fixes.callers import spelled
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")

MODEL, ENCODER = "diffusers-model-footprint", "transformers-model-footprint"
SHOWS = r"\d+ bytes are reported, \d+ are held"


def assert_right(model) -> None:
    weights, buffers = sum(map(held, model.parameters())), sum(map(held, model.buffers()))
    for reported, real in (
        (model.get_memory_footprint(), weights + buffers),
        (model.get_memory_footprint(return_buffers=False), weights),
        (model.get_memory_footprint(False), weights),
    ):
        assert reported == real, f"{reported} bytes are reported, {real} are held"


def torchao_model(library: str, folder, weights: str):
    whole = models.flux_transformer() if library == "diffusers" else models.t5_encoder()
    config = pytest.importorskip(library).TorchAoConfig(ao.config(weights))
    folder = models.saved(whole, folder / "plain")
    return type(whole).from_pretrained(folder, quantization_config=config, torch_dtype=torch.bfloat16)


@pytest.mark.parametrize("weights", ["int8", "int2", "float8"])
@pytest.mark.defect(MODEL, shows=SHOWS, needs="diffusers>=0.33")
def test_a_transformer_with_quanto_weights(tmp_path, weights):
    assert_right(q.load_flux(q.saved_flux(tmp_path), weights, torch.bfloat16))


@pytest.mark.parametrize("weights", ["int8", "int4", "float8"])
@pytest.mark.defect(ENCODER, shows=SHOWS)
def test_a_text_encoder_with_quanto_weights(tmp_path, weights):
    assert_right(q.load_t5(models.saved(models.t5_encoder(), tmp_path), weights, torch.bfloat16))


@pytest.mark.parametrize("weights", ["int8", "int4", "float8"])
@pytest.mark.defect(MODEL, shows=SHOWS, needs=["diffusers>=0.36", "torchao>=0.15"])
def test_a_transformer_with_torchao_weights(tmp_path, weights):
    assert_right(torchao_model("diffusers", tmp_path, weights))


@pytest.mark.parametrize("weights", ["int8", "float8"])
@pytest.mark.defect(ENCODER, shows=SHOWS, needs=["transformers>=4.57", "torchao>=0.15"])
def test_a_text_encoder_with_torchao_weights(tmp_path, weights):
    assert_right(torchao_model("transformers", tmp_path, weights))


@pytest.mark.defect(MODEL, shows=SHOWS, needs="diffusers>=0.33")
def test_on_the_device_and_back(gpu, tmp_path):
    model = q.load_flux(q.saved_flux(tmp_path), "int8")
    for place in (gpu.devices[0], "cpu"):
        model.to(place)
        assert_right(model)


def test_other_models_are_as_large_as_before(tmp_path):
    assert_right(models.flux_transformer())
    assert_right(models.flux_transformer().to("meta"))
    assert_right(models.t5_encoder().to(torch.bfloat16))
    if not unmet("gguf"):
        model = gguf_models.transformer(tmp_path)
        weights = list(model.parameters())
        assert model.get_memory_footprint() == sum(one.numel() * one.element_size() for one in weights)


@pytest.mark.defect(MODEL, shows=r"\d+ bytes were copied", needs="diffusers>=0.35")
def test_two_models_that_have_room_stay(gpu, tmp_path, monkeypatch):
    """Under the components manager, on a device that has room for both of them, but not for what they were."""
    from diffusers import ComponentsManager

    device, folder = gpu.devices[0], q.saved_flux(tmp_path)
    manager, loaded = ComponentsManager(), [q.load_flux(folder, "int8", torch.bfloat16) for _ in range(2)]
    sizes = [sum(map(held, model.parameters())) for model in loaded]
    room = sum(sizes) + 2 * max(sizes) // 3
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (room - gpu.allocated(device), room))
    for number, model in enumerate(loaded):
        manager.add(f"model_{number}", model.to("cpu"))
    before = gpu.allocated(device)
    room += before
    manager.enable_auto_cpu_offload(spelled(device), memory_reserve_margin="1KB")
    for model in loaded:
        q.run_flux(model, device, torch.bfloat16)
    copied = gpu.traffic(device).h2d
    for model in loaded:
        q.run_flux(model, device, torch.bfloat16)
    copied = gpu.traffic(device).h2d - copied
    assert copied < min(sizes), f"{copied} bytes were copied"
