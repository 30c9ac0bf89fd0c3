"""A tiny prior of Kandinsky, and the latents that its pipelines make with it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIZE = 16


def tiny() -> Any:
    """The prior, on the CPU."""
    import torch
    from diffusers import PriorTransformer

    torch.manual_seed(0)
    model = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        embedding_dim=SIZE,
        num_embeddings=4,
        additional_embeddings=4,
    )
    for statistic in (model.clip_mean, model.clip_std):
        torch.nn.init.normal_(statistic)
    return model.eval().requires_grad_(False)


def scaled(model: Any, device: Any) -> Any:
    """One pass, and the scaling of the latents after it."""
    import torch

    generator = torch.Generator().manual_seed(0)
    latents, embedding, states = (
        torch.randn(shape, generator=generator).to(device) for shape in ((1, SIZE), (1, SIZE), (1, 4, SIZE))
    )
    output = model(latents, timestep=1, proj_embedding=embedding, encoder_hidden_states=states)
    return model.post_process_latents(output.predicted_image_embedding)
