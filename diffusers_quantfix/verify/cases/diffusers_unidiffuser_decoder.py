"""UniDiffuser's text decoder is called by its methods under model offload."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import unidiffuser

    return unidiffuser.check()
