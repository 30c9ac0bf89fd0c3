"""The functions that run in this process. They are only read: a frame belongs to the function that runs in it.

Before Python 3.13 even reading ``frame.f_locals`` writes into the frame: it overwrites what a debugger has set, and a
dict that ``locals()`` returned earlier. So the variables are read from 3.13 on only.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["NAMED", "in_a_model", "is_ours", "place", "running", "users_functions", "variables"]

NAMED = sys.version_info >= (3, 13)  # whether the variables of a frame can be read without changing it
_PACKAGE = __name__.partition(".")[0]


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Where code lies that is nobody's own program."""
    import sysconfig  # which some platforms answer late

    return (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")


_IN_A_MODEL = {"torch.nn.modules.module": "_call_impl", "torch.autograd.graph": "_engine_run_backward"}


def running() -> dict[int, list[types.FrameType]]:
    """Thread ``ident`` -> its frames, the innermost first, without those of this package."""
    found: dict[int, list[types.FrameType]] = {}
    for ident, frame in sys._current_frames().items():
        found[ident] = []
        following: types.FrameType | None = frame
        while following is not None:
            if not is_ours(following):
                found[ident].append(following)
            following = following.f_back
    del frame  # perhaps of this very function: a cycle, which would keep the variables of all callers
    return found


def is_ours(frame: types.FrameType) -> bool:
    """Whether a frame runs code of this package."""
    return _home(frame).partition(".")[0] == _PACKAGE


def in_a_model() -> bool:
    """Whether another thread is inside any ``torch.nn.Module`` or backward pass."""
    return any(
        _IN_A_MODEL.get(_home(frame)) == frame.f_code.co_name
        for ident, frames in running().items()
        if ident != threading.get_ident()
        for frame in frames
    )


def _home(frame: types.FrameType) -> str:
    name = dict.get(frame.f_globals, "__name__")
    return name if type(name) is str else ""


def variables(frame: types.FrameType) -> Iterator[tuple[str, Any]]:
    """The variables of a function, where they can be read; not of a module or class body, whose variables are in a
    dict."""
    if NAMED and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        yield from list(frame.f_locals.items())


def place(frame: types.FrameType) -> str:
    """A function for a person: "main (app.py:12)"."""
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short name only
    return f"{function} ({Path(code.co_filename).name}:{frame.f_lineno})"


def users_functions() -> list[str]:
    """The functions of the calling thread that belong to no library, the innermost first."""
    return [
        place(frame)
        for frame in running()[threading.get_ident()]
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED
        and not frame.f_code.co_filename.startswith(_libraries())
    ]
