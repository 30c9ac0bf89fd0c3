"""The embeddings of SigLIP 2 have a 4-bit layer for the patches."""

from __future__ import annotations

from ..case import CannotReproduce


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit

    where = four_bit.device()
    try:
        from transformers.models.siglip2 import configuration_siglip2, modeling_siglip2
    except ImportError:
        raise CannotReproduce("needs transformers 4.50, which brought SigLIP 2") from None
    torch.manual_seed(0)
    config = configuration_siglip2.Siglip2VisionConfig(
        hidden_size=64, num_channels=4, patch_size=4, num_patches=4
    )
    embeddings = modeling_siglip2.Siglip2VisionEmbeddings(config).to(where).eval()
    embeddings.patch_embedding = four_bit.linear(embeddings.patch_embedding, where)
    shapes = torch.tensor([[2, 2]], device=where)
    with torch.no_grad():
        one, other = (embeddings(torch.rand(1, 4, 64, device=where), shapes) for _ in range(2))
    assert (one - other).abs().max() > 1e-3, "the output does not depend on the image"
    return "depends on the image"
