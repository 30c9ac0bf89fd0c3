"""A LoRA is loaded into the UNet of Kandinsky 3."""

from __future__ import annotations

from ..models import unets


def case(work: str) -> str | None:
    return unets.check("Kandinsky3UNet")
