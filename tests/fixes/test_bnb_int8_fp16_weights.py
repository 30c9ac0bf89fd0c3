"""bnb-int8-fp16-weights: models loaded with llm_int8_has_fp16_weight=True cannot run."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, four_bit
from tests.gate import unmet
from tests.rig import models

FIX_ID = "bnb-int8-fp16-weights"
SHOWS = r"'(Tensor|Parameter)' object has no attribute 'S?CB'"


@pytest.fixture(autouse=True)
def kernels():
    if unmet("bitsandbytes<0.45") and unmet("bitsandbytes>=0.46"):
        pytest.skip("the rig has no stand-in for the kernel of bitsandbytes 0.45 that quantizes by columns")


def config(library):
    return library.BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True)


def flux(folder):
    import diffusers
    import torch

    from diffusers_quantfix.verify.models.flux import transformer

    transformer().save_pretrained(folder)
    return diffusers.FluxTransformer2DModel.from_pretrained(
        folder,
        quantization_config=config(diffusers),
        torch_dtype=torch.float16,
    )  # onto the first device; diffusers 0.31 takes no device_map


def layers_of(model) -> list:
    return [layer for layer in model.modules() if type(layer).__name__ == "Linear8bitLt"]


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_transformer_of_diffusers(gpu, tmp_path):
    import torch

    here = gpu.devices[0]
    model = flux(tmp_path)
    output = models.call_flux(models.flux_pipeline(model), device=here, dtype=torch.float16)
    assert torch.isfinite(output.cpu()).all()
    for layer in layers_of(model):
        assert type(layer.weight).__name__ == "Int8Params"
        assert layer.weight.dtype == torch.float16
        assert layer.weight.device == here
        assert not layer.weight.requires_grad


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_text_encoder_of_transformers(gpu, tmp_path):
    import torch
    import transformers

    here = gpu.devices[0]
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    transformers.T5EncoderModel(transformers.T5Config(**sizes)).save_pretrained(tmp_path)
    with four_bit.skip_for_other_reasons():
        model = transformers.T5EncoderModel.from_pretrained(
            tmp_path,
            quantization_config=config(transformers),
            torch_dtype=torch.float16,
            device_map={"": here},
        ).eval()
    assert layers_of(model)
    with torch.no_grad():
        states = model(torch.tensor([[1, 2, 3]], device=here)).last_hidden_state
    assert torch.isfinite(states.cpu()).all()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_weight_alone(gpu):
    import torch
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    here = gpu.devices[0]
    layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=True).half()
    whole = torch.nn.Sequential(layer).to(here).eval()
    expected = eight_bit.run(whole, here)
    weight = Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=True)
    assert weight.to("cpu").dtype == torch.float16
    layer._parameters["weight"] = weight.to(here)
    layer.state.CB = None
    assert torch.equal(eight_bit.run(whole, here), expected)


def test_a_weight_that_is_quantized_on_its_way_is_upstreams(gpu):
    import torch

    layer = eight_bit.linear(gpu.devices[0])
    assert layer.weight.dtype == torch.int8
    assert type(layer.weight).__name__ == "Int8Params"
