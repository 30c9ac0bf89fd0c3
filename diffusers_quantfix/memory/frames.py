"""The functions that run in this process, and their variables: the garbage collector sees neither since Python 3.11."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

__all__ = ["is_ours", "locals_of", "running"]

_PACKAGE = __name__.partition(".")[0]


def running(ours: bool = False) -> dict[int, list[types.FrameType]]:
    """Thread ``ident`` -> its frames, the innermost first.

    Args:
        ours: with those of this package. Who has its own frame among its variables has to delete them.
    """
    found: dict[int, list[types.FrameType]] = {}
    for ident, frame in sys._current_frames().items():
        found[ident] = []
        following: types.FrameType | None = frame
        while following is not None:
            if following.f_code is not running.__code__ and (ours or not is_ours(following)):
                found[ident].append(following)
            following = following.f_back
        del frame
    return found


def is_ours(frame: types.FrameType) -> bool:
    """Whether a frame runs code of this package."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a running function; empty for the body of a module or class, whose variables are in a dict."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
    variables = frame.f_locals
    found = dict(variables)
    # Before 3.13 it is a copy that stays with the frame: it would keep everything alive that the function deletes. The
    # frame, our variable and the argument have it; if someone else has it, it is what locals() gave them.
    if sys.version_info < (3, 13) and sys.getrefcount(variables) <= 3:
        variables.clear()
    return found
