"""Finds out whose code a function is.  Other tools patch the same libraries, before us and after us."""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType, MethodType, ModuleType

from .errors import ForeignPatch
from .interruptions import heed_interruption
from .probe import home_of, name_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OURS = __name__.partition(".")[0]


def leads_to(value: Any, goal: Any) -> bool:
    """Whether ``value`` is ``goal`` or a wrapper around it: by ``functools.wraps``, wrapt, a closure or a partial.

    A wrapper may hold a bound method, or the function inside a staticmethod.
    """
    goals = {id(goal), id(getattr(goal, "__func__", goal)), id(getattr(goal, "fget", goal))}
    pending = [value]
    seen: set[int] = set()
    while pending and len(seen) < 256:  # a wrapper that wraps itself must not hang an import
        value = pending.pop()
        if id(value) in goals:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            pending += _inside(value)
    return False


def _inside(value: Any) -> list[Any]:
    """The objects that a value holds, one of which it may wrap."""
    found = []
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if _is_code(content) or isinstance(content, MethodType):
                found.append(content)
    for name in ("__wrapped__", "__func__", "fget", "func", "_self_parent"):
        try:
            inner = getattr(value, name, None)
        except Exception as error:  # objects that raise on every attribute access
            heed_interruption(error)
            continue
        if inner is not None:
            found.append(inner)
    return found


def is_native(owner: Any, value: Any) -> bool:
    """Whether ``value`` is code of its owner's library."""
    module = _module_of(owner)
    return module is not None and home_of(value).partition(".")[0] == module.__name__.partition(".")[0]


def refuse_foreign(owner: Any, name: str, value: Any) -> None:
    """Raise `ForeignPatch` if ``value`` was put there by a tool that the owner's module does not import."""
    home = foreign_home(owner, value)
    if home:
        raise ForeignPatch(
            f"{name_of(owner)}.{name} was replaced by {home} before us",
            f"import {OURS} before it, or leave it as it is",
        )


def foreign_home(owner: Any, value: Any) -> str:
    """The module of the tool that put ``value`` there; empty if it is code of the owner's library, or not code.

    A method may belong to another library from the start: ``@torch.no_grad()`` makes it a function of torch.  But then
    the module that defines it has imported something from that library.
    """
    home = home_of(value) if _is_code(value) else ""
    library = home.partition(".")[0]
    module = _module_of(owner)
    if not home or module is None or library in (OURS, module.__name__.partition(".")[0]):
        return ""
    if library in sys.stdlib_module_names:  # it patches nothing; dataclasses have methods made by reprlib
        return ""
    defined = _names_defined(module)
    for attribute, held in vars(module).copy().items():
        # A value under a name that the module itself defines may come from the same tool.
        if held is not value and attribute not in defined and _library_of(held) == library:
            return ""
    return home


def _module_of(owner: Any) -> ModuleType | None:
    if isinstance(owner, ModuleType):
        return owner
    return sys.modules.get(home_of(owner))


def _names_defined(module: ModuleType) -> frozenset[str]:
    """The functions and classes that a module's source defines; empty if there is no source."""
    try:
        spec = module.__spec__
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # guarded as a whole
        return frozenset(constant.co_name for constant in code.co_consts if isinstance(constant, CodeType))
    except Exception as error:  # loaders of all kinds: built-in, extension, or third-party
        heed_interruption(error)
        return frozenset()


def _is_code(value: Any) -> bool:
    kinds = (FunctionType, property, staticmethod, classmethod, functools.partial)
    try:
        return isinstance(value, kinds) or hasattr(value, "__wrapped__")
    except Exception as error:
        heed_interruption(error)
        return False


def _library_of(value: Any) -> str:
    """The library of something that a module holds, without triggering lazy imports."""
    try:
        if issubclass(type(value), ModuleType):
            name = object.__getattribute__(value, "__dict__").get("__name__")
        else:
            name = getattr(value, "__module__", None)
    except Exception as error:
        heed_interruption(error)
        return ""
    return str(name).partition(".")[0]
