"""diffusers-save-with-lora: a quantized model with a LoRA is saved in a form that cannot be loaded."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, lora_models
from tests.fixes.callers import each_spelling as each_spelling
from tests.fixes.callers import interrupt, spelled
from tests.rig import models

FIX_ID = "diffusers-save-with-lora"
SHOWS = (
    r"base_layer|Cannot copy out of meta tensor|DID NOT RAISE|does not contain `bitsandbytes__|meta"
    # bitsandbytes 0.48 without the package: merging into 8 bits ends before there is something to save
    r"|'NoneType' object has no attribute 'to'"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


def pipeline(folder, bits: int, *loras: str):
    import torch
    from diffusers import FluxTransformer2DModel

    lora_models.skip_where_flux_takes_no_lora(bits)
    transformer = four_bit.load(FluxTransformer2DModel, folder, bits=bits, dtype=torch.float16)
    pipe = models.flux_pipeline(transformer)
    return lora_models.load(pipe, *loras) if loras else pipe


def names_in(folder) -> set[str]:
    import safetensors.torch

    return {name for file in folder.glob("*.safetensors") for name in safetensors.torch.load_file(file)}


bits = pytest.mark.parametrize("bits", [4, 8])


@bits
@pytest.mark.parametrize("files", ["10GB", "40KB"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_merged_lora_is_in_the_checkpoint(gpu, folder, tmp_path, bits, files):
    import torch
    from diffusers import FluxTransformer2DModel

    device = gpu.devices[0]
    pipe = pipeline(folder, bits, *lora_models.NAMES).to(device)
    pipe.fuse_lora()
    merged = lora_models.run(pipe, device, torch.float16)
    pipe.transformer.save_pretrained(tmp_path, max_shard_size=files)
    wrong = [name for name in names_in(tmp_path) if "base_layer" in name or "lora" in name]
    assert not wrong, f"{len(wrong)} names of a base_layer or of a LoRA"
    again = models.flux_pipeline(FluxTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float16))
    assert torch.equal(lora_models.run(again.to(device), device, torch.float16), merged)
    assert any("base_layer" in name for name in pipe.transformer.state_dict()), (
        "the model itself is as before"
    )
    assert torch.equal(lora_models.run(pipe, device, torch.float16), merged)


@bits
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_lora_that_is_not_merged_is_refused(gpu, folder, tmp_path, bits):
    import torch

    device = gpu.devices[0]
    pipe = pipeline(folder, bits, "one").to(device)
    before = lora_models.run(pipe, device, torch.float16)
    with pytest.raises(ValueError, match=r"call unload_lora_weights\(\) before save_pretrained"):
        pipe.transformer.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    assert torch.equal(lora_models.run(pipe, device, torch.float16), before)
    pipe.unload_lora_weights()
    pipe.transformer.save_pretrained(tmp_path)
    assert names_in(tmp_path) == names_in(saved_without(folder, tmp_path / "without", bits))


def saved_without(folder, place, bits):
    return models.saved(pipeline(folder, bits).transformer, place)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_each_spelling_and_after_a_save_that_ended(gpu, folder, tmp_path, each_spelling):
    import torch
    from diffusers import FluxTransformer2DModel

    device = gpu.devices[0]
    pipe = pipeline(folder, 4, "one").to(spelled(device))
    pipe.fuse_lora()
    merged = lora_models.run(pipe, device, torch.float16)
    interrupt(lambda: pipe.transformer.save_pretrained(tmp_path / "ended"), 0.5)
    assert any("base_layer" in name for name in pipe.transformer.state_dict()), "a hook was left"
    pipe.transformer.save_pretrained(tmp_path / "whole")
    assert not [name for name in names_in(tmp_path / "whole") if "base_layer" in name], (
        "names of a base_layer"
    )
    again = FluxTransformer2DModel.from_pretrained(tmp_path / "whole", torch_dtype=torch.float16)
    again = models.flux_pipeline(again).to(spelled(device))
    assert torch.equal(lora_models.run(again, device, torch.float16), merged)


def test_saving_that_fails_leaves_no_hook(gpu, folder, tmp_path):
    pipe = pipeline(folder, 4, "one")
    pipe.fuse_lora()
    with pytest.raises(TypeError):
        pipe.transformer.save_pretrained(tmp_path, max_shard_size=object())
    assert any("base_layer" in name for name in pipe.transformer.state_dict())


def test_a_model_without_quantization_is_saved_as_before(tmp_path):
    pipe = lora_models.load(models.flux_pipeline(), "one")
    pipe.transformer.save_pretrained(tmp_path)
    assert any("base_layer" in name for name in names_in(tmp_path))
