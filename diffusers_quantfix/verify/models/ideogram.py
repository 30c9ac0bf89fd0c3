"""A tiny text encoder of Ideogram 4, and calls of its pipeline's function for it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TOKENS = 6


def text_encoder(layers: int = 36) -> Any:
    """The model on the CPU. The pipeline uses the output of the last of its 36 layers."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLModel

    text = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config=text, vision_config=vision)
    return Qwen3VLModel(config).eval().requires_grad_(False)


def states(function: Callable[..., Any], encoder: Any, device: Any) -> list[Any]:
    """The hidden states that the pipeline's ``function`` returns for a prompt with padding, on ``device``."""
    import torch

    mask = torch.ones(1, TOKENS, dtype=torch.long, device=device)
    mask[:, :2] = 0
    ids = torch.arange(1, TOKENS + 1, device=device)[None] * mask
    found: list[Any] = function(encoder, ids, mask, torch.arange(TOKENS, device=device)[None])
    return found


def check(function: Callable[..., Any]) -> str:
    """Check that ``function`` calls the text encoder's hooks, which onload it."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    called = []

    def bring(module: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(module)
        return args, kwargs

    encoder, hook = text_encoder(), ModelHook()
    hook.pre_forward = bring
    add_hook_to_module(encoder, hook)
    found = states(function, encoder, "cpu")
    assert called, "the text encoder runs where it is offloaded: its hook is not called"
    return f"{len(found)} hidden states of the text encoder, onloaded by its hook"
