"""transformers-dequantize-flags: a dequantized text encoder is a plain one."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

FIX_ID = "transformers-dequantize-flags"
SHOWS = r"You cannot cast a bitsandbytes model|quantization_config says so|can't be loaded|quantized"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_4bit_text_encoder(gpu, tmp_path):
    import torch
    from transformers import T5EncoderModel

    models.t5_encoder().save_pretrained(tmp_path / "plain")
    model = four_bit.load(T5EncoderModel, tmp_path / "plain")
    model.dequantize()
    model.save_pretrained(tmp_path / "saved")
    assert not hasattr(model.config, "quantization_config"), "config.quantization_config says so"
    again = T5EncoderModel.from_pretrained(tmp_path / "saved", torch_dtype=model.dtype)
    assert not four_bit.differences(four_bit.state_of(again), four_bit.state_of(model))
    pipeline = models.flux_pipeline(text_encoder_2=model)
    pipeline.to("cpu", torch.bfloat16)
    model.to(torch.float32)
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
    assert not hasattr(model, "quantization_method") and not model.is_quantized
