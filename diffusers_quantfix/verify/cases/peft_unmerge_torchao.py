"""A LoRA is merged into torchao weights, and unmerged."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import torchao_model

    model = torchao_model.adapted()
    layer = model.base_model.model[0]

    def weight() -> torch.Tensor:
        return layer.get_base_layer().weight.dequantize().float()

    before = weight()
    model.merge_adapter()
    assert not torch.equal(weight(), before), "merging has no effect"
    model.unmerge_adapter()
    off = float((weight() - before).norm() / before.norm())
    assert off == 0, f"the weight is off by {off:.2g} after unmerging"
    return "unmerging restores the weight, bit by bit"
