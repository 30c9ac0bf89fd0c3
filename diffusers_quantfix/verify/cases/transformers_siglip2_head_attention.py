"""The attention in the head of SigLIP 2 has a 4-bit output layer."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import siglip

    return siglip.runs_with_a_quantized_head("siglip2")
