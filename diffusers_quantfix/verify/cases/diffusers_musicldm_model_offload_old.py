"""MusicLDM, in its place before diffusers 0.38, has run under model offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import own_offload

    return own_offload.check("MusicLDMPipeline")
