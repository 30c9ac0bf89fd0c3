"""The mark of what `diffusers_quantfix.release` emptied, and its errors. torch is not imported."""

from __future__ import annotations

from typing import Any

__all__ = ["MARK", "InUseError", "ReleasedError", "message_for", "released_message"]

# In the ``__dict__`` of what was released; its value is the message.
MARK = "_diffusers_quantfix_released"


class ReleasedError(RuntimeError):
    """A pipeline or model was used after `diffusers_quantfix.release` freed its memory."""


class InUseError(RuntimeError):
    """Another thread was inside what `diffusers_quantfix.release` was to free, and stayed. Nothing was released."""


def released_message(value: Any) -> str:
    """The sentence that says that ``value`` was released, "" if it was not."""
    return str(getattr(value, "__dict__", {}).get(MARK, ""))


def message_for(name: str) -> str:
    """The sentence for something called ``name``."""
    return f"{name} was released by diffusers_quantfix.release() and has no weights any more; load it again to use it"
