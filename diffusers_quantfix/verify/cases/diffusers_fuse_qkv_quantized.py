"""``fuse_qkv_projections`` of a 4-bit model raises an error, and changes nothing."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import four_bit

    where = four_bit.device()
    model = four_bit.flux(f"{work}/flux", where)
    before, names = four_bit.run_flux(model, where), set(model.state_dict())
    try:
        model.fuse_qkv_projections()
    except ValueError as refusal:
        assert "weights cannot be fused" in str(refusal), str(refusal)
    assert torch.equal(four_bit.run_flux(model, where), before), "the output changed"
    assert set(model.state_dict()) == names, "layers were added"
    return "raises an error, before anything is fused"
