"""A Flux ControlNet is made from a transformer with 8-bit weights."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import controlnets

    return controlnets.refused("flux")
