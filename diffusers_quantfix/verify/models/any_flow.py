"""AnyFlow's embedding of time and step size, with 8-bit layers."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def steps(module: str, name: str, where: Any) -> list[Any]:
    """The embeddings of a small and a large step by the class ``name`` in a module of diffusers' transformers."""
    import importlib

    import torch
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    embedding = getattr(importlib.import_module(f"diffusers.models.transformers.{module}"), name)(
        dim=64, gate_value=0.25, deltatime_type="r", time_freq_dim=64, time_proj_dim=64, text_embed_dim=64
    )
    for layer in ("linear_1", "linear_2"):
        plain = getattr(embedding.delta_embedder, layer)
        quantized = Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
        quantized.load_state_dict(plain.state_dict())
        setattr(embedding.delta_embedder, layer, quantized)
    embedding.requires_grad_(False).to(where).eval()
    time, text = torch.full((1, 1), 900.0, device=where), torch.zeros(1, 1, 64, device=where)
    with torch.no_grad():
        return [
            embedding.forward_timestep(time, torch.full_like(time, step), text, 1)[0] for step in (0.0, 500.0)
        ]
