"""The image embedding projection of Kandinsky 2.2 has a 4-bit layer."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.models.embeddings import ImageProjection

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    projection = ImageProjection(64, 64, 2).to(where).eval()
    projection.image_embeds = four_bit.linear(projection.image_embeds, where)
    with torch.no_grad():
        one, other = (projection(torch.randn(1, 64, device=where)) for _ in range(2))
    assert (one - other).abs().max() > 1e-3, "the output does not depend on the image"
    return "runs, and depends on the image"
