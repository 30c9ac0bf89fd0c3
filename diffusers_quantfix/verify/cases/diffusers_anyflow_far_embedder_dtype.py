"""AnyFlow FAR with 8-bit layers runs with two step sizes."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import any_flow, eight_bit

    where = eight_bit.device()
    small, large = any_flow.steps(
        "transformer_anyflow_far", "AnyFlowDualTimestepTextImageEmbeddingCausal", where
    )
    assert (small - large).abs().max() > 1e-3, "the size of the step has no effect"
    return "depends on the size of its step"
