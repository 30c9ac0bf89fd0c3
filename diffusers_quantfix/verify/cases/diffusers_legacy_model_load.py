"""The transformer of VQ Diffusion is saved and loaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import Transformer2DModel

    from ..models import vq

    model = vq.transformer()
    model.save_pretrained(work)
    again = Transformer2DModel.from_pretrained(work)
    assert torch.equal(vq.predict(again), vq.predict(model)), "the output differs"
    return "computes the same"
