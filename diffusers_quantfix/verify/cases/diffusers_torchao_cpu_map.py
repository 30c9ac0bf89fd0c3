"""A Flux transformer is quantized with torchao by a device map of the CPU alone, and its checkpoint is loaded so."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def case(work: str) -> str | None:
    import diffusers
    import torch

    from ..models import flux, torchao_model

    flux.transformer().save_pretrained(f"{work}/plain")
    load = diffusers.FluxTransformer2DModel.from_pretrained
    options = {"torch_dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    config = diffusers.TorchAoConfig(torchao_model.int8())
    model = load(f"{work}/plain", quantization_config=config, **options)
    quantized = _quantized(model)
    assert quantized, "no weight is quantized"
    model.save_pretrained(f"{work}/quantized", safe_serialization=False)
    again = _quantized(load(f"{work}/quantized", use_safetensors=False, **options))
    assert again == quantized, (
        f"{len(again)} weights of the checkpoint are quantized instead of {len(quantized)}"
    )
    return f"{len(quantized)} weights are quantized, and so they are in the checkpoint"


def _quantized(model: Any) -> list[str]:
    return [name for name, weight in model.named_parameters() if hasattr(weight.data, "__tensor_flatten__")]
