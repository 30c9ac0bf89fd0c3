"""Attend-and-Excite has computed its loss from the attention maps."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import attention_store

    return attention_store.check()
