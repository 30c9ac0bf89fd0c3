"""UniDiffuser's text decoder, in its place before diffusers 0.38, is called by its methods under model offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import unidiffuser

    return unidiffuser.check()
