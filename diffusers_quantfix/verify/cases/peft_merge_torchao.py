"""A DoRA is merged into torchao weights."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import torchao_model

    model = torchao_model.adapted(use_dora=True)
    given = torch.linspace(-1, 1, 128, dtype=torch.bfloat16).view(2, 64)
    with torch.no_grad():
        model.base_model.model[0].lora_magnitude_vector["default"].weight.mul_(1.5)
        before = model(given).float()
        model.merge_adapter()
        off = float((model(given).float() - before).norm() / before.norm())
    assert off < 0.1, f"merged its output is off by {off:.2g}"
    return f"off by {off:.2g}, which is rounding"
