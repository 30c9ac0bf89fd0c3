"""The quantized layers of a Flux transformer, as its LoRA loader sees them.

Upstream: ``FluxLoraLoaderMixin`` in diffusers/loaders/lora_pipeline.py.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["EXPAND", "is_too_small", "lora_of", "quantized_layers"]

# It replaces the layers that are too small for a LoRA, and is called before the LoRA is loaded.
EXPAND = "_maybe_expand_transformer_param_shape_or_error_"


def quantized_layers(transformer: Any) -> list[tuple[str, Any]]:
    """(name, layer) of every linear layer with a quantized parameter.

    ``in_features`` and ``out_features`` are those of the layer, whatever shape the packed weight has.
    """
    import torch

    return [
        (name, layer)
        for name, layer in transformer.named_modules()
        if isinstance(layer, torch.nn.Linear) and type(layer.weight) is not torch.nn.Parameter
    ]


def lora_of(name: str, lora: dict[str, Any], prefix: str) -> tuple[str, Any, Any]:
    """(key of ``lora_A``, ``lora_A``, ``lora_B``) of a layer in the state dict of a LoRA, or ("", None, None)."""
    name = name.removesuffix(".base_layer")
    for start in (f"{prefix}.{name}", name):
        key = f"{start}.lora_A.weight"
        if key in lora:
            return key, lora[key], lora.get(f"{start}.lora_B.weight")
    return "", None, None


def is_too_small(layer: Any, down: Any, up: Any) -> bool:
    """Whether the layer has fewer features than the LoRA whose ``lora_A`` and ``lora_B`` these are."""
    return down.shape[1] > layer.in_features or (up is not None and up.shape[0] > layer.out_features)
