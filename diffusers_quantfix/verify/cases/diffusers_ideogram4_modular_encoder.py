"""Ideogram 4, as a modular pipeline, encodes a prompt under offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    from diffusers.modular_pipelines.ideogram4.encoders import Ideogram4TextEncoderStep

    from ..models import ideogram

    return ideogram.check(Ideogram4TextEncoderStep._get_text_encoder_hidden_states)
