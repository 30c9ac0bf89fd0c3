"""A T5 encoder that quanto quantized is dequantized."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch
    from transformers import QuantoConfig, T5Config, T5EncoderModel

    from ..models import quanto_models

    folder = os.path.join(work, "t5")
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)
    model = T5EncoderModel.from_pretrained(
        folder, quantization_config=QuantoConfig(weights="int4"), torch_dtype=torch.float16
    ).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        reference = model(tokens)[0]
        model.dequantize()
        off = quanto_models.error(model(tokens)[0], reference)
    assert off < 0.005, f"relative error {off:.4f}"
    return f"dequantized; relative error {off:.4f}"
