"""Finds objects of modules that were executed again: by ``importlib.reload``, after a deletion from ``sys.modules``, or
by an import that was repeated after Ctrl-C.

The objects of the first time still exist, with all patches, but the program does not find them under their names.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType

from .classes import attributes, is_a, mro, namespace
from .foreign import leads_to
from .interruptions import heed_interruption
from .probe import function_of, home_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["is_defined_again"]


def is_defined_again(owner: Any) -> bool:
    """Whether another module, class or function, from the same code, has the name of ``owner`` now."""
    if is_a(owner, ModuleType):
        return _is_executed_again(owner)
    if not is_a(owner, (type, FunctionType)):
        return False
    found: Any = sys.modules.get(home_of(owner))
    for name in owner.__qualname__.split("."):
        held = attributes(found) if is_a(found, type) else namespace(found)
        found = (held or {}).get(name)
    if is_a(owner, type):
        # A decorator may have put a subclass there, which has the names of its base.
        return is_a(found, type) and owner not in mro(found) and _names(found) == _names(owner)
    try:
        function = function_of(found)
    except Exception as error:  # nothing, or no function; wrappers may raise on every attribute access
        heed_interruption(error)
        return False
    return _names(function) == _names(owner) and not leads_to(found, owner)


def _is_executed_again(module: ModuleType) -> bool:
    mine = _spec(module)
    other: Any = sys.modules.get(getattr(mine, "name", ""))
    if other is module or not is_a(other, ModuleType):
        return False
    # A module that a program has made to stand in for this one has no spec, or the same one.
    spec = _spec(other)
    return spec is not mine and _code(spec) == _code(mine)


def _spec(module: Any) -> Any:
    return (namespace(module) or {}).get("__spec__")


def _code(spec: Any) -> tuple[Any, Any]:
    return getattr(spec, "name", None), getattr(spec, "origin", None)


def _names(value: Any) -> tuple[str, str]:
    return home_of(value), value.__qualname__
