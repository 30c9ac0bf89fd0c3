"""Whether a library still has the code on which a fix was proved.

A fix relies on pieces of code of the libraries, each named ``module:path`` as in
``diffusers.hooks.group_offloading:ModuleGroup.onload_``: functions, classes and constants.  Of a piece that it
replaces, edits or inspects, all of the code counts.  Of one that it only calls, or that its probe runs, the interface
counts (`fingerprint.of_interface`), and the name ends in ``()``: the probe runs again, before and after patching.

The mark of a piece is what is compared: of a function the number of its lines, the hash of their text and the
fingerprint; of a class its bases; of a constant its value, where that is simple.

Nothing is imported or run here.  A piece in a module that is not imported counts as changed.
"""

from __future__ import annotations

import functools
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

from . import fingerprint
from .foreign import foreign_home
from .probe import home_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = [
    "ABSENT",
    "CALLED",
    "GONE",
    "Files",
    "difference",
    "find",
    "inner_function",
    "is_same",
    "mark",
    "moved_to",
]

CALLED = "()"  # ends the name of a piece of which only the interface counts
GONE = " is gone"  # ends the phrase for what is not there
ABSENT = object()  # what `find` returns where there is nothing
_COMPARED = 20  # functions of about the same length that may be the one that is gone
_SIMPLE = (str, bytes, int, float, complex, type(None))


class Files:
    """The lines of source files, each read once; dropped after a decision, unlike the cache of `linecache`."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def lines(self, path: str) -> list[str]:
        """The lines of a file; none where it cannot be read."""
        lines = self._lines.get(path)
        if lines is None:
            try:
                with open(path, encoding="utf-8") as file:
                    lines = file.readlines()
            except (OSError, ValueError):
                lines = []
            self._lines[path] = lines
        return lines


def difference(
    name: str, proved: str, files: Files, below: Callable[[Any, str, Any], Any] | None = None
) -> str:
    """How a piece of code is not as it was proved, as a phrase such as "x has changed"; empty where it is.

    Args:
        name: of the piece.
        proved: its mark in the release in which a fix was proved.
        files: where source is read.
        below: see `find`.
    """
    plain = name.removesuffix(CALLED)
    value = find(plain, below)
    if value is ABSENT:
        return f"{plain}{GONE}"
    now = mark(value, files, name.endswith(CALLED), proved)
    if is_same(proved, now):
        return ""
    foreign = foreign_home(sys.modules[plain.partition(":")[0]], value)
    if foreign:
        return f"{plain} was replaced by code of {foreign}"
    return f"{plain} has changed" if now else f"{plain} has no source that can be read"


def find(name: str, below: Callable[[Any, str, Any], Any] | None = None) -> Any:
    """The raw value of a piece of code; `ABSENT` where this release, or this process, does not have it.

    Args:
        name: ``module:path``.
        below: called with (owner, name, value), returns what the library itself has there, below our patches.
    """
    home, _, path = name.partition(":")
    value: Any = sys.modules.get(home)
    if value is None:
        return ABSENT
    for step in path.split("."):
        owner = value
        if isinstance(owner, type):
            owner = next((base for base in owner.__mro__ if step in vars(base)), owner)
            value = vars(owner).get(step, ABSENT)
        else:
            value = vars(owner).get(step, ABSENT) if isinstance(owner, ModuleType) else ABSENT
        if value is ABSENT:
            return ABSENT
        if below is not None:
            value = below(owner, step, value)
    return value


def inner_function(value: Any) -> FunctionType | None:
    """The Python function inside a property, classmethod, partial or wrappers; None where there is none."""
    for _ in range(64):  # a wrapper that wraps itself must not hang an import
        if isinstance(value, FunctionType):
            if "__wrapped__" not in vars(value):
                return value
            value = value.__wrapped__  # type: ignore[attr-defined]
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, (functools.partial, functools.cached_property)):
            value = value.func
        elif isinstance(value, type) or not hasattr(value, "__wrapped__"):
            return None
        else:
            value = value.__wrapped__
    return None


def moved_to(name: str, proved: str, below: Callable[[Any, str, Any], Any]) -> str:
    """Where the code of a function that is gone is now, in what is imported of its library; empty where it is not.

    It is looked for under its own name everywhere, and under any name in its own module.

    Args:
        name: of the piece.
        proved: its mark.
        below: see `find`.
    """
    home, _, path = name.removesuffix(CALLED).partition(":")
    last = path.rpartition(".")[2]
    count = proved.partition(" ")[0]
    if not count.isdigit():
        return ""
    candidates = []
    for place, owner, attribute, value in _functions(home.partition(".")[0], home, last, "." in path):
        function = inner_function(below(owner, attribute, value))
        if function is not None:
            code = function.__code__
            candidates.append((abs(_last_line(code) - code.co_firstlineno + 1 - int(count)), place, code))
    files = Files()
    for _, place, code in sorted(candidates, key=lambda candidate: candidate[:2])[:_COMPARED]:
        if place == name.removesuffix(CALLED):
            continue
        try:
            tree = fingerprint.definition(
                fingerprint.block_at(files.lines(code.co_filename), code.co_firstlineno)
            )
            found = fingerprint.of_function(tree, last, name.endswith(CALLED))
        except Exception:  # no source, or a lambda
            continue
        if found and found == proved.rpartition(" ")[2].partition("@")[0]:
            return place
    return ""


def mark(value: Any, files: Files, called: bool = False, known: str = "") -> str:
    """What is compared of a piece of code; empty where nothing can be said of it.

    Args:
        value: a raw value, of `find`.
        files: where its source is read.
        called: only the interface counts.
        known: the mark that it had where it was proved.  Where the text is the same it is returned, and nothing is
            parsed.
    """
    function = inner_function(value)
    if function is not None:
        return _mark_of_code(function.__code__, files, called, known, _wrapped_by(value, function))
    if isinstance(value, CodeType):
        return _mark_of_code(value, files, called, known, "")
    if isinstance(value, type):
        return "class " + " ".join(f"{base.__module__}:{base.__qualname__}" for base in value.__bases__)
    if isinstance(value, (ModuleType, BuiltinFunctionType)):
        return f"{type(value).__name__} {value.__name__}"
    return f"value {fingerprint.text_hash(_constant(value))}"


def is_same(one: str, other: str) -> bool:
    """Whether two marks, of which only one may be empty, stand for the same code."""
    if one[:1].isdigit() and other[:1].isdigit():
        return one.rpartition(" ")[2] == other.rpartition(" ")[2]
    return bool(one) and one == other


# ---------------------------------------------------------------------- helpers


def _wrapped_by(value: Any, function: FunctionType) -> str:
    """The library of the outermost wrapper of a function, where it is another one: a decorator, or a tool that patches.

    Decorators are part of a function's text; what a tool has put over them is not.
    """
    home = home_of(value).partition(".")[0]
    return "" if home == function.__globals__.get("__name__", "").partition(".")[0] else f"@{home}"


def _mark_of_code(code: CodeType, files: Files, called: bool, known: str, wrapper: str) -> str:
    if code.co_filename.startswith(
        "<"
    ):  # made from a text that the library wrote, as the methods of a dataclass are
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return f"generated {code.co_name} {' '.join(arguments)}"
    lines, first = files.lines(code.co_filename), code.co_firstlineno
    if not lines:
        return ""
    count, _, rest = known.partition(" ")
    if count.isdigit():
        text = "".join(lines[first - 1 : first - 1 + int(count)])
        proved_text, _, proved = rest.partition(" ")
        equal = fingerprint.text_hash(text) == proved_text and proved.partition("@")[2] == wrapper[1:]
        if equal and not _goes_on(lines, first - 1, first - 1 + int(count)):
            return known
    try:
        text = fingerprint.block_at(lines, first)
        tree = fingerprint.definition(text)
        same = fingerprint.of_interface(tree) if called else fingerprint.of_tree(tree)
    except Exception:  # a lambda in the middle of an expression, or a file that has changed since its import
        return ""
    return f"{text.count(chr(10))} {fingerprint.text_hash(text)} {same}{wrapper}"


def _goes_on(lines: list[str], first: int, end: int) -> bool:
    """Whether the definition that begins at a line, and was complete before ``end``, has more lines now."""
    for line in lines[end:]:
        text = line.lstrip()
        if text and text[0] != "#":
            return len(line) - len(text) > len(lines[first]) - len(lines[first].lstrip())
    return False


def _functions(library: str, home: str, last: str, methods: bool) -> Iterator[tuple[str, Any, str, Any]]:
    """(name, owner, attribute, value) of the functions of a library that are called ``last`` or stand in ``home``."""
    for module_name, module in sys.modules.copy().items():
        if not isinstance(module_name, str) or module_name.partition(".")[0] != library:
            continue
        if not isinstance(module, ModuleType):
            continue
        names = vars(module).copy()
        for attribute in names if module_name == home else {last} & names.keys():
            function = inner_function(names[attribute])
            if function is not None and function.__module__ == module_name:
                yield f"{module_name}:{attribute}", module, attribute, names[attribute]
        for value in names.values() if methods else ():
            if not isinstance(value, type) or value.__module__ != module_name:
                continue
            for attribute in vars(value).copy() if module_name == home else {last} & vars(value).keys():
                yield (
                    f"{module_name}:{value.__qualname__}.{attribute}",
                    value,
                    attribute,
                    vars(value)[attribute],
                )


def _last_line(code: CodeType) -> int:
    lines = [line for _, _, line in code.co_lines() if line]
    inside = [_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return max([*lines, *inside, code.co_firstlineno])


def _constant(value: Any) -> str:
    """A text of a constant, the same in each process; of any other object its class only."""
    if isinstance(value, bool) or type(value) not in (*_SIMPLE, tuple, list, set, frozenset, dict):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, dict):
        items = (f"{_constant(key)}: {_constant(item)}" for key, item in value.items())
        return "{" + ", ".join(sorted(items)) + "}"
    inside = [_constant(item) for item in value]
    return (
        f"{type(value).__name__}({', '.join(inside if isinstance(value, (tuple, list)) else sorted(inside))})"
    )
