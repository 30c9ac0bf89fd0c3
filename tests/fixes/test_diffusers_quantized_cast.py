"""diffusers-quantized-cast, diffusers-quantized-modular-cast: quantized components keep their dtype."""

from __future__ import annotations

import logging

import pytest

from tests.fixes import casts, four_bit
from tests.rig import models

FIX_ID, MODULAR = "diffusers-quantized-cast", "diffusers-quantized-modular-cast"
SHOWS = r"Casting a quantized model to a new `dtype`|dtype of a weights Tensor cannot be changed|it is torch\.bfloat16"

backends = pytest.mark.parametrize("backend", ["gguf", "torchao", "quanto"])


@backends
@pytest.mark.parametrize("device", [None, "cpu"], ids=["dtype", "device and dtype"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_others_are_cast(tmp_path, backend, device):
    import torch

    model = casts.loaded(backend, tmp_path)
    pipeline = casts.pipeline(model)
    before = casts.dtypes(pipeline)["transformer"]
    with casts.unchanged(model):
        pipeline.to(*([] if device is None else [device]), torch.bfloat16)
    assert casts.dtypes(pipeline) == {
        "vae": {"bfloat16"}, "text_encoder": {"bfloat16"}, "transformer": before
    }  # fmt: skip


@pytest.fixture
def said(caplog):
    """What diffusers logs, whether it passes that on or not."""
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@backends
def test_a_run_after_the_cast_is_right_or_says_what_is_wrong(tmp_path, backend, said):
    """Layers that take no input of another dtype raise; none gives another result without a word."""
    import torch

    pipeline = casts.pipeline(casts.loaded(backend, tmp_path))
    expected = models.call_flux(pipeline, "cpu", torch.float32)
    pipeline.to(torch.bfloat16)
    assert "load the module with `torch_dtype=torch.bfloat16`" in said.text
    assert torch.equal(models.call_flux(pipeline, "cpu", torch.float32), expected)
    try:
        output = models.call_flux(pipeline, "cpu", torch.bfloat16).float()
    except RuntimeError as error:
        assert "dtype" in str(error) or "scalar type" in str(error)
        return
    assert (output - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("backend", ["torchao", "quanto"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_text_encoder_is_not_cast_by_halves(tmp_path, backend):
    import torch
    from transformers import T5EncoderModel

    encoder = casts.loaded(backend, tmp_path, T5EncoderModel)
    pipeline = casts.pipeline(models.flux_transformer(), text_encoder_2=encoder)
    with casts.unchanged(encoder):
        pipeline.to("cpu", dtype=torch.bfloat16)
    assert casts.dtypes(pipeline)["transformer"] == {"bfloat16"}


@pytest.mark.defect(MODULAR, shows=SHOWS)
def test_a_modular_pipeline(tmp_path):
    import torch

    pytest.importorskip("diffusers.modular_pipelines", reason="diffusers 0.35.0 brought modular pipelines")
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline

    model = casts.loaded("gguf", tmp_path)
    pipeline = object.__new__(ModularPipeline)
    parts = {"transformer": model, "vae": models.vae()}
    vars(pipeline).update(parts, _component_specs=dict.fromkeys(parts), hf_device_map=None)
    with casts.unchanged(model):
        pipeline.to("cpu", torch.bfloat16)
    assert pipeline.vae.dtype == torch.bfloat16


def test_it_moves_whole(gpu, tmp_path):
    import torch

    device = torch.device(gpu.devices[-1])
    model = casts.loaded("gguf", tmp_path)
    pipeline = casts.pipeline(model)
    pipeline.to(device, torch.bfloat16)
    assert {parameter.device for parameter in model.parameters()} == {device}
    assert casts.dtypes(pipeline)["vae"] == {"bfloat16"}
    pipeline.to("cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_bitsandbytes_goes_on_as_upstream_has_it(gpu, tmp_path):
    import torch
    from diffusers import FluxTransformer2DModel

    models.flux_transformer().save_pretrained(tmp_path)
    model = four_bit.load(FluxTransformer2DModel, tmp_path)
    pipeline = casts.pipeline(model)
    before = casts.dtypes(pipeline)["transformer"]
    pipeline.to("cpu", torch.bfloat16)
    assert casts.dtypes(pipeline)["transformer"] == before
    assert casts.dtypes(pipeline)["vae"] == {"bfloat16"}
    four_bit.assert_whole(model, "cpu")


def test_the_model_itself_goes_on_refusing(tmp_path):
    import torch

    model = casts.loaded("gguf", tmp_path)
    with pytest.raises(ValueError, match="Casting a quantized model"):
        model.to(torch.bfloat16)
    pipeline = casts.pipeline(model)
    with pytest.raises(ValueError, match="at most two arguments"):
        pipeline.to("cpu", torch.bfloat16, 3)
    with pytest.raises(ValueError, match="Casting a quantized model"):
        model.to(torch.bfloat16)
