"""LoRAs of any width for the first layer of a quantized Flux, and what a model gives with them."""

from __future__ import annotations

import os

from tests.fixes import four_bit, gguf_models, lora_models
from tests.rig import models

X_EMBEDDER = "transformer.x_embedder"


def bare() -> bool:
    """Whether the package is off."""
    return os.environ.get("DIFFUSERS_QUANTFIX") == "off"


def transformer(backend: str, folder, channels: int = 64):
    """A Flux with ``channels`` input channels: "nf4" and "fp4" (float16), "int8" (float16), "gguf" (float32, CPU)."""
    import torch
    from diffusers import FluxTransformer2DModel

    plain = models.flux_transformer()
    if channels != 64:
        torch.manual_seed(3)
        config = {**plain.config, "in_channels": channels, "out_channels": 64}
        plain = FluxTransformer2DModel.from_config(config).eval()
    if backend == "gguf":
        return gguf_models.packed(plain, folder / "gguf", "Q8_0", "F32")
    models.saved(plain, folder / "plain")
    if backend == "int8":
        return four_bit.load(FluxTransformer2DModel, folder / "plain", bits=8)
    return four_bit.load(FluxTransformer2DModel, folder / "plain", bnb_4bit_quant_type=backend)


def lora(channels: int, seed: int = 1) -> dict:
    """A LoRA for the attention layers and the first layer, which has ``channels`` input channels in it."""
    import torch

    found = lora_models.weights(seed)
    generator = torch.Generator().manual_seed(seed)
    found[f"{X_EMBEDDER}.lora_A.weight"] = 0.3 * torch.randn(4, channels, generator=generator)
    found[f"{X_EMBEDDER}.lora_B.weight"] = 0.3 * torch.randn(64, 4, generator=generator)
    return found


def predicted(model, device, channels: int = 64):
    """The output of the transformer for fixed inputs, on the CPU."""
    import torch

    dtype = model.x_embedder.bias.dtype
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "hidden_states": (1, 4, channels),
        "encoder_hidden_states": (1, 8, 64),
        "pooled_projections": (1, 64),
    }
    inputs = {
        name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()
    }
    ids = {name: torch.zeros(length, 3, device=device) for name, length in (("img_ids", 4), ("txt_ids", 8))}
    timestep = torch.ones(1, device=device, dtype=dtype)
    with torch.no_grad():
        return model(**inputs, **ids, timestep=timestep, return_dict=False)[0].cpu()


def with_peft(model, weights: dict):
    """``model`` with the LoRA as PEFT itself puts it in; ``weights`` fit the model."""
    import torch
    from peft import LoraConfig

    targets = sorted({key.removeprefix("transformer.").rpartition(".lora_")[0] for key in weights})
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets), adapter_name="one")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, value in weights.items():
            name, _, side = key.removeprefix("transformer.").rpartition(".lora_")
            parameters[f"{name}.lora_{side[0]}.one.weight"].copy_(value)
    return model
