"""A LoRA is loaded into the UNet of a text-to-video pipeline."""

from __future__ import annotations

from ..models import unets


def case(work: str) -> str | None:
    return unets.check("UNet3DConditionModel")
