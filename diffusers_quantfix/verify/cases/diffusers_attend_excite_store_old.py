"""Attend-and-Excite, in its place before diffusers 0.38, has computed its loss from the attention maps."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import attention_store

    return attention_store.check()
