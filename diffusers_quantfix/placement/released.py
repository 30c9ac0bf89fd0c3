"""The mark on objects that `diffusers_quantfix.release` emptied, and the error on their use. torch is not imported."""

from __future__ import annotations

from typing import Any

from ..engine.classes import namespace

__all__ = ["MARK", "InUseError", "ReleasedError", "message_for", "released_message"]

# A key in the ``__dict__`` of a released object; its value is the message.
MARK = "_diffusers_quantfix_released"


class ReleasedError(RuntimeError):
    """A pipeline or model was used after `diffusers_quantfix.release` freed its memory."""


class InUseError(RuntimeError):
    """No longer raised, and kept for programs that catch it: `diffusers_quantfix.release` does not wait for other
    threads, which get `ReleasedError`."""


def released_message(value: Any) -> str:
    """The message if ``value`` was released, else ""."""
    message = (namespace(value) or {}).get(MARK, "")
    return message if type(message) is str else ""


def message_for(name: str, is_empty: bool = True) -> str:
    """The message for a pipeline or model called ``name``; ``is_empty``: whether it has lost its weights."""
    if not is_empty:
        return (
            f"{name} was released by diffusers_quantfix.release(); use a pipeline that shares its components"
        )
    return f"{name} was released by diffusers_quantfix.release() and has no weights any more; load it again to use it"
