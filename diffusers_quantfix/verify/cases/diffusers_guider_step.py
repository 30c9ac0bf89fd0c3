"""A guider that ends early has two conditions again before the next run."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers import ClassifierFreeGuidance

    from ..models import guiders

    guider = ClassifierFreeGuidance(guidance_scale=2.0, stop=0.5)
    wanted = guider.num_conditions
    outputs = [guiders.run(guider) for _ in range(2)]
    assert guider.num_conditions == wanted, (
        f"{guider.num_conditions} condition between two runs, not {wanted}"
    )
    assert torch.equal(*outputs), "the second run differs"
    return f"{wanted} conditions before each run"
