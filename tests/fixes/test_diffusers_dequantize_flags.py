"""diffusers-dequantize-flags: a dequantized model is a plain model."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit_models, four_bit, gguf_models, group_offloaded
from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import each_spelling as each_spelling
from tests.fixes.offloaded import offload_model
from tests.gate import unmet
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


@pytest.mark.defect(FIX_ID, shows=r"DID NOT RAISE|need to be on the same GPU|Expected a cuda device")
@pytest.mark.parametrize("kind", ["4 bits", "gguf"])
def test_an_offloaded_model_is_refused(gpu, folder, tmp_path, kind):
    """In groups, which without the package fails later only: other defects come first elsewhere."""
    model = quantized(kind, folder, tmp_path)
    offload_model(model, gpu.devices[0], "group")
    assert_refused(model)


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.parametrize("way", ["sequential", "group"])
@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "gguf"])
def test_a_refused_model_runs_and_is_dequantized_when_the_hooks_are_off(gpu, folder, tmp_path, kind, way):
    import torch
    from accelerate.hooks import remove_hook_from_module

    device = gpu.devices[0]
    model = quantized(kind, folder, tmp_path / "a")
    offload_model(model, device, way)
    before = run(model, device)
    assert_refused(model)

    def check(latents):
        assert torch.equal(latents, before)

    check(run(model, device))
    assert_goes_on(lambda: run(model, device), check)
    if kind == "gguf" and unmet("diffusers>=0.42"):
        return  # its layers are of several types there, once it is dequantized
    if kind == "8 bits" and (unmet("diffusers>=0.33") or unmet("bitsandbytes>=0.45")):
        return  # by a kernel that the rig has not; and with tiles not once a layer has run
    if way == "sequential":
        remove_hook_from_module(model, recurse=True)
    else:
        group_offloaded.stop(model)
    model.to(device).dequantize()
    reference = quantized(kind, folder, tmp_path / "b").to(device)
    reference.dequantize()
    assert torch.equal(run(model, device), run(reference, device))


def assert_refused(model):
    layers, attributes, config = list(map(type, model.modules())), set(vars(model)), dict(model.config)
    with pytest.raises(
        ValueError, match=r"offloaded, and dequantize\(\) would leave it broken: call it before"
    ):
        model.dequantize()
    assert list(map(type, model.modules())) == layers
    assert set(vars(model)) == attributes and dict(model.config) == config


def quantized(kind, folder, own):
    """A model in 4 or 8 bits, or of a GGUF file, which is written to the folder ``own``."""
    from diffusers import FluxTransformer2DModel

    if kind == "4 bits":
        return four_bit.load(FluxTransformer2DModel, folder)
    if kind == "8 bits":
        return eight_bit_models.transformer(own / "plain", "patched")
    own.mkdir(exist_ok=True)
    return gguf_models.transformer(own)


def run(model, device):
    # Not ``model.dtype``, which the first weight decides in older releases.
    dtype = next(tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    return models.call_flux(models.flux_pipeline(model), device=device, dtype=dtype).cpu()


def test_what_cannot_be_dequantized_stays_quantized():
    from types import SimpleNamespace

    from diffusers.quantizers.base import DiffusersQuantizer

    model = SimpleNamespace(hf_quantizer=object(), is_quantized=True, quantization_method="quanto")
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="quanto"))
    quantizer._dequantize = lambda given: DiffusersQuantizer._dequantize(quantizer, given)
    with pytest.raises(NotImplementedError):
        DiffusersQuantizer.dequantize(quantizer, model)
    assert model.is_quantized and model.quantization_method == "quanto"
