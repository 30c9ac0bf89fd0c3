"""A Flux transformer that quanto quantized is dequantized."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch

    from ..models import four_bit, quanto_models

    model = quanto_models.flux(os.path.join(work, "flux"), "int4")
    cpu = torch.device("cpu")
    reference = four_bit.run_flux(model, cpu)
    model.dequantize()
    off = quanto_models.error(four_bit.run_flux(model, cpu), reference)
    assert off < 0.005, f"relative error {off:.4f}"
    return f"dequantized; relative error {off:.4f}"
