"""Quanto weights are loaded with a dict as ``map_location``."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import mapped, quanto_models

    return mapped.check({qtype: quanto_models.layers(qtype) for qtype in quanto_models.QTYPES})
