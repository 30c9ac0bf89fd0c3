"""quanto quantizes a Flux transformer except one named block."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_models

    model = quanto_models.flux(work, "int8", kept=["transformer_blocks.0"])
    block = model.transformer_blocks[0]
    layers = [layer for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    quantized = sum(type(layer) is not torch.nn.Linear for layer in layers)
    assert not quantized, f"{quantized} of {len(layers)} layers of the named block are quantized"
    return f"none of {len(layers)} layers of the named block is quantized"
