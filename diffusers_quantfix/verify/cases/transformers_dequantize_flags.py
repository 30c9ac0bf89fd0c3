"""A dequantized 4-bit text encoder is saved and cast."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit

    model = four_bit.text_encoder(f"{work}/plain", four_bit.device())
    model.dequantize()
    model.save_pretrained(f"{work}/saved")
    assert not hasattr(model.config, "quantization_config"), "its config still has a quantization_config"
    model.to(torch.bfloat16)
    return f"dequantized, saved and cast to {next(model.parameters()).dtype}"
