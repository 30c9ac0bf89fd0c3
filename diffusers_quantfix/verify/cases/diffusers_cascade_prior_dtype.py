"""The pipeline of Stable Cascade's prior runs with 4-bit layers."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import cascade, four_bit

    where = four_bit.device()
    model = cascade.prior().to(where)
    expected = cascade.run(model, where)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, four_bit.linear(layer, where))
    error = ((cascade.run(model, where) - expected).norm() / expected.norm()).item()
    assert error < 0.3, f"differs by {error:.0%}"
    return "runs"
