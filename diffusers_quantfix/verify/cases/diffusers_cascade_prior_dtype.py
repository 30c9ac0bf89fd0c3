"""The pipeline of Stable Cascade's prior runs with 4-bit layers."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import cascade, four_bit

    where = four_bit.device()
    model = cascade.prior().to(where)
    expected = cascade.run(model, where)
    error = (
        (cascade.run(four_bit.quantized(model, where), where) - expected).norm() / expected.norm()
    ).item()
    assert error < 0.3, f"differs by {error:.0%}"
    return "runs"
