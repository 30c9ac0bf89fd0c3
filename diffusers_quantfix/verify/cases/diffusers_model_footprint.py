"""The size of a quantized transformer is asked for."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import flux, footprint

    return footprint.reported(flux.transformer())
