"""Pipelines whose models are group-offloaded, except for the VAE, and what they compute beside these models."""

from __future__ import annotations

from . import group_offload, ledits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def classic(device: Any, offload: Callable[..., None] = group_offload.apply) -> Any:
    """LEdits++ with a text encoder; ``offload(model, device)`` offloads it and the denoiser."""
    import transformers

    pipe = ledits.pipeline("LEditsPPPipelineStableDiffusion")
    pipe.text_encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    ).eval()
    pipe.vae.to(device)
    for model in (pipe.text_encoder, pipe.unet):
        offload(model, device)
    return pipe


def modular(device: Any, offload: Callable[..., None] = group_offload.apply) -> Any:
    """A modular pipeline of one model; ``offload(model, device)`` offloads it."""
    import torch
    import transformers
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline

    torch.manual_seed(0)
    model = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=8, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    ).eval()
    offload(model, device)
    # Its constructor requires the blocks of a model family.
    pipe = object.__new__(ModularPipeline)
    vars(pipe).update(text_encoder=model, _component_specs={"text_encoder": None}, hf_device_map=None)
    return pipe


def step(pipe: Any) -> Any:
    """What a block of a modular pipeline does: inputs on the execution device, and an output beside them."""
    import torch

    inputs = torch.ones(1, 4, 8, device=pipe._execution_device)
    with torch.no_grad():
        return inputs + pipe.text_encoder(inputs_embeds=inputs)[0]
