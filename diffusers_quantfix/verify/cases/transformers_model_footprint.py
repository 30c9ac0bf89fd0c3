"""The size of a quantized text encoder is asked for."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import footprint, t5

    return footprint.reported(t5.encoder())
