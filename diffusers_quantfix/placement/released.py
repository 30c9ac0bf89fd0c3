"""The mark on objects that `diffusers_quantfix.release` emptied, and the error on their use. torch is not imported."""

from __future__ import annotations

from typing import Any

from ..engine.classes import namespace

__all__ = ["MARK", "InUseError", "ReleasedError", "message_for", "message_for_pipeline", "released_message"]

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


def message_for(name: str) -> str:
    """The message for a model called ``name``."""
    return f"{name} was released by diffusers_quantfix.release() and has no weights any more; load it again to use it"


def message_for_pipeline(name: str) -> str:
    """The message for a pipeline called ``name``, of which others may use components."""
    return (
        f"{name} was released by diffusers_quantfix.release(); load it again to use it, or use a pipeline that "
        "shares its components"
    )
