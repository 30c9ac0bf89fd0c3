"""Wrappers that torch.compile skips: if several fixes wrap one method, only the outermost disables the compiler.

``torch.compiler.disable`` returns a wrapper that changes the compiler's state and restores it at each call. Inside the
outermost wrapper that is already done.
"""

from __future__ import annotations

import sys
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["uncompiled", "within"]

# Wrapper of `uncompiled` -> its function. Not an attribute: functools.wraps would copy it to other functions.
_functions: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that torch.compile skips it."""
    wrapper: Callable[..., Any] = sys.modules["torch"].compiler.disable(function)
    _functions[wrapper] = function
    return wrapper


def within(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` without its `uncompiled` wrapper, for calls from another `uncompiled` function."""
    return _functions.get(original, original)
