"""A tiny HunyuanDiT."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def transformer() -> Any:
    """A ``HunyuanDiT2DModel`` of four blocks with random weights, in float32 on the CPU."""
    import torch
    from diffusers import HunyuanDiT2DModel

    torch.manual_seed(0)
    return HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=32,
        num_layers=4,
        cross_attention_dim=32,
        cross_attention_dim_t5=32,
        pooled_projection_dim=16,
        text_len=4,
        text_len_t5=4,
    ).eval()


def run(model: Any, device: Any) -> Any:
    """The prediction for fixed inputs: [1, 8, 8, 8] on the CPU."""
    import torch

    made = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=made).to(device, model.dtype)

    mask = torch.ones(1, 4, device=device, dtype=torch.long)
    rotary = tuple(torch.ones(16, 16, device=device) for _ in range(2))
    with torch.no_grad():
        return model(
            random(1, 4, 8, 8),
            torch.tensor([3.0], device=device, dtype=model.dtype),
            encoder_hidden_states=random(1, 4, 32),
            text_embedding_mask=mask,
            encoder_hidden_states_t5=random(1, 4, 32),
            text_embedding_mask_t5=mask,
            image_meta_size=random(6),
            style=torch.zeros(1, dtype=torch.long, device=device),
            image_rotary_emb=rotary,
            return_dict=False,
        )[0].cpu()
