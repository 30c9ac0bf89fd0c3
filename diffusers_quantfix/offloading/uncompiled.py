"""Wrappers that torch.compile skips: if several fixes wrap one method, only the outermost disables the compiler.

``torch.compiler.disable`` returns a wrapper that changes the compiler's state and restores it at each call. Inside the
outermost wrapper that is already done.
"""

from __future__ import annotations

import functools
import sys
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["uncompiled", "uncompiled_later", "within"]

# Wrapper of `uncompiled` -> its function. Not an attribute: functools.wraps would copy it to other functions.
_functions: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that torch.compile skips it."""
    wrapper: Callable[..., Any] = sys.modules["torch"].compiler.disable(function)
    _functions[wrapper] = function
    return wrapper


def uncompiled_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but torch's compiler is not imported before a program does, as accelerate's hooks do it."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = sys.modules["torch"].compiler.disable(function)
        return disabled(*args, **kwargs)

    return wrapper


def within(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` without its `uncompiled` wrapper, for calls from another `uncompiled` function."""
    return _functions.get(original, original)
