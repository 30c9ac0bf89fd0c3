"""The time embedding of Lumina-Next has a 4-bit layer."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.models.embeddings import LuminaCombinedTimestepCaptionEmbedding

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    embedding = LuminaCombinedTimestepCaptionEmbedding(64, 64, 64).to(where).eval()
    embedder = embedding.timestep_embedder
    embedder.linear_1 = four_bit.linear(embedder.linear_1, where)
    caption, mask = torch.randn(1, 2, 64, device=where), torch.ones(1, 2, device=where)
    with torch.no_grad():
        one, other = (embedding(torch.tensor([time], device=where), caption, mask) for time in (1, 900))
    assert (one - other).abs().max() > 1e-3, "the output does not depend on the time"
    return "runs, and depends on the time"
