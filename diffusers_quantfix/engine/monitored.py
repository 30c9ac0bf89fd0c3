"""Code that tools watch by itself: `sys.monitoring.set_local_events`, of Python 3.12 and later."""

from __future__ import annotations

import contextlib
import sys
from types import CodeType

from .bytecode import codes_inside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["watch_also"]

_TOOLS = range(6)


def watch_also(new: CodeType, old: CodeType) -> None:
    """Let the tools that watch ``old`` watch ``new`` too, with the inner functions of the same names."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        return
    for tool in _TOOLS:
        with contextlib.suppress(ValueError):  # it is in use no more
            if monitoring.get_tool(tool) and (events := monitoring.get_local_events(tool, old)):
                monitoring.set_local_events(tool, new, events | monitoring.get_local_events(tool, new))
    named = {code.co_name: code for code in codes_inside(old)}
    for code in codes_inside(new):
        if (before := named.get(code.co_name, code)) is not code:
            watch_also(code, before)
