"""A saved Flux transformer with quanto weights is loaded; weights that are quantized on meta are counted."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    import torch

    from ..models import quanto_models

    folder = os.path.join(work, "quantized")
    saved = quanto_models.flux(os.path.join(work, "flux"), "int8")
    saved.save_pretrained(folder)
    with quanto_models.counting() as counting:
        loaded = quanto_models.flux(folder)
    for (name, one), other in zip(saved.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(getattr(one, "_data", one), getattr(other, "_data", other)), f"{name} differs"
    layers = [layer for layer in loaded.modules() if hasattr(layer, "qweight")]
    shapes = {layer.weight.shape for layer in layers}
    assert counting.quantized <= len(shapes), (
        f"{counting.quantized} weights without data were quantized, for {len(layers)} layers of {len(shapes)} shapes"
    )
    return f"{counting.quantized} weights without data were quantized, for {len(layers)} layers"
