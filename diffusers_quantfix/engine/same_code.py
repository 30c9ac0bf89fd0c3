"""Whether a library still has the code on which a fix was proved.

A fix relies on pieces of code of the libraries, each named ``module:path`` as in
``diffusers.hooks.group_offloading:ModuleGroup.onload_``: functions, classes and constants.  For a piece that the fix
replaces, edits or inspects, all of the code is compared.  For one that it only calls, or that its probe runs, only the
interface is (`fingerprint.of_interface`), and the name ends in ``()``: the probe runs again, before and after patching.

Pieces are compared by their marks (`code_marks`).  A piece is named as it is looked up, which may go through an import
or inheritance: if other code is found there, that is a change.

Nothing is imported or run here.  A piece in a module that is not imported counts as changed.
"""

from __future__ import annotations

import sys
from types import CodeType, ModuleType

from . import fingerprint
from .code_marks import CALLED, Files, inner_function, is_same, mark
from .foreign import foreign_home
from .interruptions import heed_interruption

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["ABSENT", "GONE", "difference", "find", "moved_to"]

GONE = " is gone"  # ends the phrase for a missing piece
ABSENT = object()  # what `find` returns if there is nothing
_COMPARED = 20  # functions of about the same length that may be the missing one


def difference(
    name: str, proved: str, files: Files, below: Callable[[Any, str, Any], Any] | None = None
) -> str:
    """How a piece of code differs from the proved one, as a phrase such as "x has changed"; empty if it does not.

    Args:
        name: of the piece.
        proved: its mark in the release in which the fix was proved.
        files: reads source files.
        below: see `find`.
    """
    plain = name.removesuffix(CALLED)
    value = find(plain, below)
    if value is ABSENT:
        return f"{plain}{GONE}"
    now = mark(name, value, files, proved, below)
    if is_same(proved, now):
        return ""
    foreign = foreign_home(sys.modules[plain.partition(":")[0]], value)
    if foreign:
        return f"{plain} was replaced by code of {foreign}"
    return f"{plain} has changed" if now else f"{plain} has no source that can be read"


def find(name: str, below: Callable[[Any, str, Any], Any] | None = None) -> Any:
    """The raw value of a piece of code; `ABSENT` if this release, or this process, does not have it.

    Args:
        name: ``module:path``.
        below: called with (owner, name, value), returns the library's own value there, below our patches.
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


def moved_to(name: str, proved: str, below: Callable[[Any, str, Any], Any]) -> str:
    """Where the code of a missing function is now, in the imported modules of its library; empty if not found.

    It is searched for under its own name everywhere, and under any name in its own module.

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
            tree = fingerprint.definition(files.block(code.co_filename, code.co_firstlineno))
            found = fingerprint.of_function(tree, last, name.endswith(CALLED))
        except Exception as error:  # no source, or a lambda
            heed_interruption(error)
            continue
        if found and found == proved.rpartition(" ")[2][: len(found)]:
            return place
    return ""


# ---------------------------------------------------------------------- helpers


def _functions(library: str, home: str, last: str, methods: bool) -> Iterator[tuple[str, Any, str, Any]]:
    """(name, owner, attribute, value) for the functions of a library that are called ``last`` or are in ``home``."""
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
