"""Whether a library still has the code on which a fix was proved.

A piece of code is named ``module:path``, as in ``diffusers.hooks.group_offloading:ModuleGroup.onload_``: a function, a
class or a constant of a library.  Its mark is what is compared: for a function the number of its lines, the hash of
their text and its fingerprint; for a class its bases; for a constant its value, where that is simple.

Nothing is imported or run here: a piece in a module that is not imported has no mark.
"""

from __future__ import annotations

import functools
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

from . import fingerprint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Files", "find", "inner_function", "mark"]

_ABSENT = object()
_SIMPLE = (str, bytes, int, float, complex, type(None))


class Files:
    """The lines of source files, each read once; to be dropped with the decision, unlike the cache of `linecache`."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def lines(self, path: str) -> list[str]:
        """The lines of a file, none where it cannot be read."""
        lines = self._lines.get(path)
        if lines is None:
            try:
                with open(path, encoding="utf-8", newline=None) as file:
                    lines = file.readlines()
            except (OSError, ValueError):
                lines = []
            self._lines[path] = lines
        return lines


def find(name: str, below: Callable[[Any, str, Any], Any] = lambda owner, name, value: value) -> Any:
    """The raw value of a piece of code; ``None`` where this release, or this process, does not have it.

    Args:
        name: ``module:path``.
        below: called with (owner, name, value), returns what the library itself has there, below our patches.
    """
    home, _, path = name.partition(":")
    value: Any = sys.modules.get(home)
    if value is None:
        return None
    for step in path.split("."):
        owner = value
        if isinstance(owner, type):
            value = next((vars(base)[step] for base in owner.__mro__ if step in vars(base)), _ABSENT)
        else:
            value = vars(owner).get(step, _ABSENT) if isinstance(owner, ModuleType) else _ABSENT
        if value is _ABSENT:
            return None
        value = below(owner, step, value)
    return value


def inner_function(value: Any) -> FunctionType | None:
    """The Python function inside a property, classmethod, partial or wrappers, None where there is none."""
    for _ in range(64):
        if isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
            return value
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif isinstance(value, type) or not hasattr(value, "__wrapped__"):
            return None
        else:
            value = value.__wrapped__
    return None


def mark(value: Any, files: Files, known: str = "") -> str:
    """What is compared of a piece of code; empty where nothing can be said of it.

    Args:
        value: a raw value, of `find`.
        files: where its source is read.
        known: the mark that it had where it was proved.  Where the text is the same, it is returned as it is, and
            nothing is parsed.
    """
    function = inner_function(value)
    if function is not None:
        return _mark_of_code(function.__code__, files, known)
    if isinstance(value, CodeType):
        return _mark_of_code(value, files, known)
    if isinstance(value, type):
        return "class " + " ".join(f"{base.__module__}:{base.__qualname__}" for base in value.__bases__)
    if isinstance(value, (ModuleType, BuiltinFunctionType)):
        return f"{type(value).__name__} {value.__name__}"
    return f"value {fingerprint.text_hash(_constant(value))}"


def _mark_of_code(code: CodeType, files: Files, known: str) -> str:
    if code.co_filename.startswith("<"):  # made by the library from a text, as the methods of a dataclass are
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return f"generated {code.co_name} {' '.join(arguments)}"
    lines, first = files.lines(code.co_filename), code.co_firstlineno
    if not lines:
        return ""
    count, _, rest = known.partition(" ")
    if count.isdigit():
        text = "".join(lines[first - 1 : first - 1 + int(count)])
        if fingerprint.text_hash(text) == rest.partition(" ")[0]:
            return known
    try:
        text = fingerprint.block_at(lines, first)
        tree = fingerprint.of_text(text)
    except Exception:  # a lambda in the middle of an expression, or a file that has changed since its import
        return ""
    return f"{text.count(chr(10))} {fingerprint.text_hash(text)} {tree}"


def is_same(one: str, other: str) -> bool:
    """Whether two marks stand for the same code."""
    if not one or not other:
        return False
    if one[0].isdigit() and other[0].isdigit():
        return one.rpartition(" ")[2] == other.rpartition(" ")[2]
    return one == other


def _constant(value: Any) -> str:
    """A text of a constant, the same in each process; of another object only its class."""
    if isinstance(value, bool) or type(value) not in (*_SIMPLE, tuple, list, set, frozenset, dict):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_constant(key)}: {_constant(item)}" for key, item in value.items())) + "}"
    inside = [_constant(item) for item in value]
    return f"{type(value).__name__}({', '.join(inside if isinstance(value, (tuple, list)) else sorted(inside))})"
