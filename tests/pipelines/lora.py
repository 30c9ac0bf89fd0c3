"""A tiny random LoRA for the attention of a pipeline's denoiser, loaded as users load one."""

from __future__ import annotations

PROJECTIONS = ("to_q", "to_k", "to_v", "to_query", "to_key", "to_value", "img_qkv_proj", "txt_kv_proj")


def is_loaded_by(kind: type) -> bool:
    """Whether a class of pipelines has a loader of LoRAs, for a denoiser with attention of diffusers' own kind."""
    return hasattr(kind, "load_lora_weights") and bool(_name(kind))


def _name(kind: type) -> str:
    """The component that the loader puts LoRAs into."""
    parts = kind._get_signature_types()
    names = (
        getattr(kind, "transformer_name", ""),
        getattr(kind, "unet_name", ""),
        "transformer",
        "unet",
        "prior",
    )
    return next((name for name in names if name in parts), "")


def load(pipe) -> None:
    pipe.load_lora_weights(weights(pipe), adapter_name="one")


def weights(pipe) -> dict:
    """The LoRA's state dict."""
    import torch

    name = _name(type(pipe))
    generator, found = torch.Generator().manual_seed(1), {}
    for path, layer in getattr(pipe, name).named_modules():
        if isinstance(layer, torch.nn.Linear) and path.endswith(PROJECTIONS):
            for half, shape in (("A", (4, layer.in_features)), ("B", (layer.out_features, 4))):
                found[f"{name}.{path}.lora_{half}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    if not found:
        raise AssertionError(f"{name} has no layers for a LoRA")
    return found
