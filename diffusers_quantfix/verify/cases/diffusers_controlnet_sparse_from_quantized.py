"""A sparse ControlNet is made from a UNet with 8-bit weights."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import controlnets

    return controlnets.refused("sparse")
