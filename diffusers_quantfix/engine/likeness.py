"""Makes a new value look like the one it replaces: to pickle, copy, inspect, typing and ``help``.

Whatever stores a function by reference (pickle, and so multiprocessing and ``torch.save``) finds the patched one in a
process with this package, and the library's own without it.
"""

from __future__ import annotations

import functools
import sys
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType

from .errors import TargetMissing
from .probe import slot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


def made_like(old: Any, make: Callable[[Any], Any], owner: Any, name: str) -> Any:
    """The new value for the slot ``owner.name``, which holds ``old``, made from the function that ``make`` returns.

    ``make`` is given the function inside a staticmethod, classmethod or ``functools.cached_property``, and its result
    is wrapped again; a property, or any other value, is given as it is.
    """
    if isinstance(old, (staticmethod, classmethod)):
        new = _like(old.__func__, make(old.__func__), owner, name)
        return type(old)(new) if isinstance(new, FunctionType) else new
    if isinstance(old, functools.cached_property):
        new = _like(old.func, make(old.func), owner, name)
        if isinstance(new, FunctionType):
            new = type(old)(new)
            new.attrname = old.attrname  # otherwise set by ``__set_name__`` in the class body
        return new
    new = make(old)
    if isinstance(old, property) and type(new) is property:
        for accessor in ("fget", "fset", "fdel"):
            _like(getattr(old, accessor), getattr(new, accessor), owner, name)
        return property(new.fget, new.fset, new.fdel, old.__doc__)
    return _like(old, new, owner, name)


def _like(old: Any, new: Any, owner: Any, name: str) -> Any:
    """``new`` with the names, documentation, annotations, attributes and signature of ``old``.

    If the owner has it from elsewhere, by inheritance or ``from x import f``, the new one is named as the owner's:
    under the old one's name pickle would find that one, and refuse.
    """
    known = isinstance(old, (FunctionType, *_OF_C)) or hasattr(old, "__wrapped__")
    if not isinstance(new, FunctionType) or new is old or not known:
        return new
    attributes = vars(new).copy()  # what torch.compiler.disable set is about the new one
    attributes.pop("__wrapped__", None)
    functools.update_wrapper(new, old)
    vars(new).update(attributes)
    if not isinstance(owner, (type, ModuleType)):
        return new
    place = _place(old)
    if place is not None and place != (id(owner), name):
        if isinstance(owner, type):
            new.__module__, new.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        else:
            new.__module__, new.__qualname__ = owner.__name__, name
    return new


def _place(function: Any) -> tuple[int, str] | None:
    """Where pickle finds a function by its names: the ``id`` of its owner, and its name there; None if nowhere."""
    owner: Any = None
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "builtins")
    steps = function.__qualname__.split(".")
    try:
        for step in steps:
            owner, (_, found) = found, slot(found, step)
    except TargetMissing:
        return None
    same = found is function or getattr(found, "__func__", None) is function
    return (id(owner), steps[-1]) if same else None
