"""diffusers-layerwise-casting-lora: layerwise casting and a LoRA in another dtype fail."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, lora_models
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-layerwise-casting-lora"
SHOWS = r"same dtype|Cannot copy out of meta tensor; no data!"  # the second: diffusers-lora-offload-flip comes before
pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
if unmet("diffusers>=0.33"):
    pytest.skip("layerwise casting: from 0.33 on", allow_module_level=True)


def relative_error(output, reference) -> float:
    return lora_models.distance(output, reference) / reference.float().abs().max().item()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.45")
def test_an_8bit_model(gpu, tmp_path, dtype):
    import torch
    from diffusers import FluxTransformer2DModel

    dtype = getattr(torch, dtype)
    device = gpu.devices[0]
    models.flux_transformer().save_pretrained(tmp_path)
    model = four_bit.load(FluxTransformer2DModel, tmp_path, bits=8, dtype=dtype)
    pipeline = models.flux_pipeline(model)
    plain = lora_models.run(pipeline, device, dtype)
    lora_models.load(pipeline, "one")
    expected = lora_models.run(pipeline, device, dtype)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
    for _ in range(2):
        assert relative_error(lora_models.run(pipeline, device, dtype), expected) < 0.01
    assert relative_error(plain, expected) > 0.04, "the LoRA has an effect"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_unquantized_model():
    """As in training, where the adapter is in float32."""
    import torch

    pipeline = lora_models.load(models.flux_pipeline(models.flux_transformer().bfloat16()), "one")
    for name, parameter in pipeline.transformer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    expected = lora_models.run(pipeline, dtype=torch.bfloat16)
    pipeline.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    assert relative_error(lora_models.run(pipeline, dtype=torch.bfloat16), expected) < 0.1


def test_an_adapter_that_is_cast_as_well_is_upstreams_business():
    import torch
    from diffusers.hooks import apply_layerwise_casting
    from diffusers.hooks.layerwise_casting import _PEFT_AUTOCAST_DISABLE_HOOK

    pipeline = lora_models.load(models.flux_pipeline(models.flux_transformer().bfloat16()), "one")
    expected = lora_models.run(pipeline, dtype=torch.bfloat16)
    apply_layerwise_casting(pipeline.transformer, torch.float8_e4m3fn, torch.bfloat16, ("norm",))
    layer = pipeline.transformer.transformer_blocks[0].attn.to_q
    assert layer.lora_A["one"].weight.dtype == torch.float8_e4m3fn
    assert layer._diffusers_hook.get_hook(_PEFT_AUTOCAST_DISABLE_HOOK) is not None
    assert relative_error(lora_models.run(pipeline, dtype=torch.bfloat16), expected) < 0.2
