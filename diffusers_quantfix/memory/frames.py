"""The functions that run in this process. Frames are only read, since they belong to running functions.

Before Python 3.13 even reading ``frame.f_locals`` writes to the frame: it overwrites values set by a debugger, and the
dict of an earlier ``locals()``. So variables are read on 3.13 and later only.
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

NAMED = sys.version_info >= (3, 13)  # whether a frame's variables can be read without changing it
_PACKAGE = __name__.removesuffix("memory.frames")  # with its dot; a program may have vendored it


@functools.cache
def _libraries() -> tuple[str, ...]:
    """The prefixes of file names of code that is not the user's program."""
    import sysconfig  # slow to import on some platforms

    return (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")


_IN_A_MODEL = {"torch.nn.modules.module": "_call_impl", "torch.autograd.graph": "_engine_run_backward"}


def running() -> dict[int, list[types.FrameType]]:
    """Thread ``ident`` -> its frames, innermost first, without this package's."""
    found: dict[int, list[types.FrameType]] = {}
    for ident, frame in sys._current_frames().items():
        found[ident] = []
        following: types.FrameType | None = frame
        while following is not None:
            if not is_ours(following):
                found[ident].append(following)
            following = following.f_back
    del frame  # perhaps this function's own: a cycle that would keep the variables of all callers
    return found


def is_ours(frame: types.FrameType) -> bool:
    """Whether a frame runs code of this package."""
    return f"{_home(frame)}.".startswith(_PACKAGE)


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
    """Yield the variables of a function's frame, if they can be read. Those of a module or class body are in a dict."""
    if NAMED and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        yield from list(frame.f_locals.items())


def place(frame: types.FrameType) -> str:
    """A frame's function and line for messages: "main (app.py:12)"."""
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has only the short name
    return f"{function} ({Path(code.co_filename).name}:{frame.f_lineno})"


def users_functions() -> list[str]:
    """The `place` of each function on the calling thread's stack that is not a library's, innermost first."""
    return [
        place(frame)
        for frame in running()[threading.get_ident()]
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED
        and not frame.f_code.co_filename.startswith(_libraries())
    ]
