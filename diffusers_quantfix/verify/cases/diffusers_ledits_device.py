"""LEdits++ encodes an image under model offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import ledits

    return ledits.check("LEditsPPPipelineStableDiffusion")
