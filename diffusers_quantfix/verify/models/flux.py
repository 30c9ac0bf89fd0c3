"""The tiny Flux transformer of the cases and tests."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def transformer(seed: int = 0, **config: Any) -> Any:
    """A random FluxTransformer2DModel with a double and a single block, float32 on the CPU."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(seed)
    defaults = {
        "in_channels": 64,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 64,
        "axes_dims_rope": (8, 12, 12),
    }
    return FluxTransformer2DModel(**{**defaults, **config}).eval()


def inputs(tokens: int = 4) -> dict[str, Any]:
    """Fixed inputs of `transformer`: ``tokens`` image tokens and 8 text tokens, float32 on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, tokens, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 64, generator=generator),
        "pooled_projections": torch.randn(1, 64, generator=generator),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(8, 3),
    }
