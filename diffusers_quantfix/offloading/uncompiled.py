"""Wrappers that torch.compile leaves alone, where several fixes wrap one method: entered once, not once for each.

``torch.compiler.disable`` returns a wrapper of its own, which changes the state of the compiler and changes it back at
each call. Within the outermost one this is done already.
"""

from __future__ import annotations

import sys
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["uncompiled", "within"]

# What `uncompiled` returned -> what it was given. Not an attribute: functools.wraps copies these to other functions.
_functions: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as torch.compile leaves it alone."""
    wrapper: Callable[..., Any] = sys.modules["torch"].compiler.disable(function)
    _functions[wrapper] = function
    return wrapper


def within(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` for a call inside of another `uncompiled` function."""
    return _functions.get(original, original)
