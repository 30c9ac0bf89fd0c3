"""diffusers-dequantize-flags: a dequantized model is a plain model."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit_models, four_bit, gguf_models
from tests.rig import models

FIX_ID = "diffusers-dequantize-flags"
SHOWS = (
    r"does not contain `bitsandbytes__|Missing quantization component|says so"
    r"|Casting a quantized model|You cannot cast a bitsandbytes model"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    models.flux_transformer().save_pretrained(path)
    return path


def assert_plain(model):
    """Nothing on the model or in its config tells of a quantization."""
    assert not getattr(model, "is_quantized", False), "is_quantized says so"
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        assert not hasattr(model, name), f"{name} says so"
    for name in ("quantization_config", "_pre_quantization_dtype"):
        assert name not in model.config and not hasattr(model.config, name), f"config.{name} says so"


def assert_lives(model, folder):
    """It is saved, loaded, cast and moved like any other; ``model`` is on the first device."""
    import torch
    from diffusers import FluxTransformer2DModel

    model.save_pretrained(folder)
    again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=model.dtype)
    assert not four_bit.differences(four_bit.state_of(again), four_bit.state_of(model))
    assert_plain(again)
    assert_plain(model)
    model.to(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    pipeline = models.flux_pipeline(model)
    pipeline.to("cpu", torch.bfloat16)
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "cpu")}


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_4bit_model(gpu, folder, tmp_path):
    from diffusers import FluxTransformer2DModel

    model = four_bit.load(FluxTransformer2DModel, folder)
    assert model.dequantize() is model
    assert_lives(model, tmp_path)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.33", "bitsandbytes>=0.45.5"))
def test_an_8bit_model(gpu, tmp_path, side):
    model = eight_bit_models.transformer(tmp_path / "plain", side)
    model.dequantize()
    assert_lives(model, tmp_path)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.42")
def test_a_gguf_model(tmp_path):
    """Before 0.42 a GGUF model is dequantized on a GPU only."""
    model = gguf_models.transformer(tmp_path)
    model.dequantize()
    assert_lives(model, tmp_path / "plain")


def test_what_cannot_be_dequantized_stays_quantized():
    from types import SimpleNamespace

    from diffusers.quantizers.base import DiffusersQuantizer

    model = SimpleNamespace(hf_quantizer=object(), is_quantized=True, quantization_method="quanto")
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="quanto"))
    quantizer._dequantize = lambda given: DiffusersQuantizer._dequantize(quantizer, given)
    with pytest.raises(NotImplementedError):
        DiffusersQuantizer.dequantize(quantizer, model)
    assert model.is_quantized and model.quantization_method == "quanto"
