"""A T5 encoder that quanto quantized is dequantized."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch

    from ..models import quanto_models

    model = quanto_models.t5(os.path.join(work, "t5"), "int4")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        reference = model(tokens)[0]
        model.dequantize()
        off = quanto_models.error(model(tokens)[0], reference)
    assert off < 0.005, f"relative error {off:.4f}"
    return f"dequantized; relative error {off:.4f}"
