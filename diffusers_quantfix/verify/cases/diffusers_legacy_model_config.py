"""The transformer of VQ Diffusion is made from its config."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import Transformer2DModel

    from ..models import vq

    model = vq.transformer()
    again = Transformer2DModel.from_config(model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(vq.predict(again.eval()), vq.predict(model)), "the output differs"
    return "computes the same"
