"""A motion module of AnimateDiff with 4-bit layers is run."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D

    from ..models import four_bit

    where = four_bit.device()
    torch.manual_seed(0)
    block = AnimateDiffTransformer3D(1, 64, in_channels=64, norm_num_groups=8).to(where).eval()
    for name in ("proj_in", "proj_out"):
        setattr(block, name, four_bit.linear(getattr(block, name), where))
    with torch.no_grad():
        out = block(torch.ones(2, 64, 2, 2, device=where), num_frames=2)
    assert out.isfinite().all(), "the output is not finite"
    return "runs"
