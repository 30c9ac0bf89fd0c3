"""diffusers-quanto-kept-modules: quanto quantizes the layers inside of modules that are not to be converted."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q
from tests.rig import models

FIX_ID = "diffusers-quanto-kept-modules"
NEEDS = ("optimum-quanto>=0.2.6", "diffusers>=0.33.0")  # what diffusers itself asks for
SHOWS = "layers are quantized"


def plain(model) -> set[str]:
    """The names of the linear layers that are not quantized."""
    import torch

    return {name for name, layer in model.named_modules() if type(layer) is torch.nn.Linear}


def loaded(folder, *names: str, **options):
    import diffusers
    import torch

    config = diffusers.QuantoConfig(weights_dtype="int8", modules_to_not_convert=list(names))
    return q.load_flux(folder, "", torch.float32, quantization_config=config, **options)


@pytest.fixture
def saved(tmp_path):
    if q.unsupported():
        pytest.skip(q.unsupported())
    q.quanto()
    return q.saved_flux(tmp_path / "flux")


@pytest.mark.parametrize(
    ("names", "matches"),
    [
        (["transformer_blocks"], lambda name: name.startswith("transformer_blocks.")),
        (["transformer_blocks.0"], lambda name: name.startswith("transformer_blocks.")),
        (["attn"], lambda name: ".attn." in name),
        (["attn.to_q"], lambda name: name.endswith("attn.to_q")),
        (["x_embedder", "norm1.linear"], lambda name: name in ("x_embedder", "transformer_blocks.0.norm1.linear")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)  # fmt: skip
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_named_modules_stay_plain(saved, names, matches):
    expected = {name for name in plain(models.flux_transformer()) if matches(name)}
    model = loaded(saved, *names)
    quantized = expected - plain(model)
    assert not quantized, f"{len(quantized)} of {len(expected)} layers are quantized"
    assert plain(model) == expected
    original = models.flux_transformer().state_dict()
    for name in expected:
        assert model.get_submodule(name).weight.equal(original[f"{name}.weight"])


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_modules_that_a_model_keeps_in_float32(saved, monkeypatch):
    import torch
    from diffusers import FluxTransformer2DModel

    monkeypatch.setattr(FluxTransformer2DModel, "_keep_in_fp32_modules", ["time_text_embed"])
    model = q.load_flux(saved, "int8", torch.bfloat16)
    layers = [layer for layer in model.time_text_embed.modules() if isinstance(layer, torch.nn.Linear)]
    quantized = [layer for layer in layers if type(layer) is not torch.nn.Linear]
    assert layers
    assert not quantized, f"{len(quantized)} of {len(layers)} layers are quantized"
    assert {layer.weight.dtype for layer in layers} == {torch.float32}


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_saved_and_loaded(saved, tmp_path, shards):
    import torch

    model = loaded(saved, "transformer_blocks")
    kept = plain(model)
    assert kept, "all layers are quantized"
    reference = q.run_flux(model, dtype=torch.float32)
    model.save_pretrained(tmp_path / "quantized", **({"max_shard_size": "100KB"} if shards else {}))
    again = q.load_flux(tmp_path / "quantized", "", torch.float32)
    assert plain(again) == kept
    saved_tensors, loaded_tensors = model.state_dict(), again.state_dict()
    assert saved_tensors.keys() == loaded_tensors.keys()
    assert all(torch.equal(tensor, loaded_tensors[name]) for name, tensor in saved_tensors.items())
    # Tensors mapped from a file are aligned otherwise, and CPU kernels may round the last bit otherwise then.
    assert torch.allclose(q.run_flux(again, dtype=torch.float32), reference, rtol=0, atol=2e-6)


def test_a_checkpoint_that_was_saved_without_the_fix(saved, tmp_path):
    """Its configuration names the block, and the layers in it are quantized all the same."""
    import torch

    model = q.load_flux(saved, "int8", torch.float32)
    reference = q.run_flux(model, dtype=torch.float32)
    model.config.quantization_config.modules_to_not_convert = ["transformer_blocks"]
    model.save_pretrained(tmp_path / "quantized")
    again = q.load_flux(tmp_path / "quantized", "", torch.float32)
    assert again.config.quantization_config.modules_to_not_convert == ["transformer_blocks"]
    assert not plain(again)
    assert torch.equal(q.run_flux(again, dtype=torch.float32), reference)


def test_the_last_part_of_a_name_matches_as_ever(saved):
    assert plain(loaded(saved, "proj_out")) == {"proj_out", "single_transformer_blocks.0.proj_out"}
    assert not plain(loaded(saved))
