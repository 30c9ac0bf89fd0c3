"""Ideogram 4 encodes a prompt under model offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    from diffusers.pipelines.ideogram4.pipeline_ideogram4 import Ideogram4Pipeline

    from ..models import ideogram

    return ideogram.check(Ideogram4Pipeline._get_text_encoder_hidden_states)
