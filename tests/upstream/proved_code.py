"""What each fix relies on, found by running it: run inside a release set, in a process that is thrown away.

    DIFFUSERS_QUANTFIX=off python -m tests.upstream.proved_code REPORT [NAMES]

For each fix whose claim and probe fit: the names of the pieces of code of the libraries that it relies on
(`diffusers_quantfix.engine.same_code`), and the mark of each.  They are

- what its draft writes to, and the constructor and bases of the class that has it;
- what its probe and its patch look up: each step of `resolve`, and what it imports of the library by name;
- the functions that its probe runs, before and after patching;
- what the functions that it replaces or reads use of the same libraries: functions, classes, constants and methods,
  one level deep.

NAMES, a file with one name a line, adds marks of further pieces: those on which a fix was found to rely elsewhere.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from diffusers_quantfix.engine import probe

_looked_up: list[tuple[Any, str]] = []
_original_slot = probe.slot


def _slot(owner: object, name: str) -> tuple[bool, Any]:
    _looked_up.append((owner, name))
    return _original_slot(owner, name)


probe.slot = _slot  # before a module that imports it by name

from diffusers_quantfix.engine.ledger import Ledger  # noqa: E402
from diffusers_quantfix.engine.same_code import Files, find, inner_function, mark  # noqa: E402
from diffusers_quantfix.engine.versions import judge  # noqa: E402
from diffusers_quantfix.fixes import INDEX  # noqa: E402

_PACKAGES = {"optimum-quanto": "optimum"}
_NEVER = {"__version__", "logger", "__name__", "__file__", "__doc__"}


def name_at(owner: Any, attribute: str) -> str:
    """The name of what ``owner`` has, by the class that defines it; empty where it cannot be found by a name."""
    if isinstance(owner, FunctionType):  # its code is exchanged
        return name_of_function(owner)
    if isinstance(owner, ModuleType):
        value = vars(owner).get(attribute)
        if isinstance(value, (FunctionType, type)) and "<locals>" not in value.__qualname__:
            named = f"{value.__module__}:{value.__qualname__}"
            if find(named) is value:
                return named
        return f"{owner.__name__}:{attribute}"
    if isinstance(owner, type) and "<locals>" not in owner.__qualname__:
        home = next((base for base in owner.__mro__ if attribute in vars(base)), None)
        return f"{home.__module__}:{home.__qualname__}.{attribute}" if home else ""
    return ""


def name_of_function(function: FunctionType) -> str:
    named = f"{function.__module__}:{function.__qualname__}"
    return "" if "<locals>" in named else named


def used_by(function: FunctionType, owner: Any, allowed: set[str]) -> set[str]:
    """What a function uses of the allowed libraries, one level deep."""
    found = set()
    names, pending = set(), [function.__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    modules = [
        value
        for name in names
        if isinstance(value := function.__globals__.get(name), ModuleType)
        and value.__name__.partition(".")[0] in allowed
    ]
    home = sys.modules.get(function.__module__)
    for name in names - _NEVER:
        value = function.__globals__.get(name)
        if value is not None and home is not None:
            if library_of(value, home) in allowed:
                found.add(name_at(home, name))
        elif isinstance(owner, type) and inspect.getattr_static(owner, name, None) is not None:
            found.add(name_at(owner, name))
        else:
            found.update(name_at(module, name) for module in modules if name in vars(module))
    return found


def library_of(value: Any, home: ModuleType) -> str:
    """The library that a value is of: of a constant the one whose module has it."""
    if isinstance(value, ModuleType):
        return ""
    inner = inner_function(value) or value
    named = inner.__module__ if isinstance(inner, (FunctionType, type)) else home.__name__
    return str(named).partition(".")[0]


def imported_by(fix: ModuleType, allowed: set[str]) -> set[str]:
    """What the file of a fix imports of the libraries by name."""
    found = set()
    for node in ast.walk(ast.parse(Path(fix.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module = sys.modules.get(node.module)
            if module is not None and node.module.partition(".")[0] in allowed:
                found.update(name_at(module, alias.name) for alias in node.names if alias.name in vars(module))
    return found


class Run:
    """The functions of some libraries that run inside a block, in this thread."""

    def __init__(self, allowed: set[str]) -> None:
        self._allowed = allowed
        self._codes: dict[CodeType, str] = {}

    def __enter__(self) -> Run:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in self._codes:
            home = frame.f_globals.get("__name__", "")
            if home.partition(".")[0] in self._allowed:
                self._codes[frame.f_code] = home

    def names(self) -> set[str]:
        """The names of those that can be found by one: not what a function defines inside."""
        found = set()
        for home in set(self._codes.values()):
            for named, code in codes_of(home).items():
                if self._codes.get(code) == home:
                    found.add(named)
        return found


def codes_of(home: str) -> dict[str, CodeType]:
    """The code of every function and method that a module defines, by name."""
    found, pending = {}, [(f"{home}:", vars(sys.modules[home]))] if home in sys.modules else []
    while pending:
        prefix, names = pending.pop()
        for name, value in list(names.items()):
            function = inner_function(value)
            if function is not None and function.__globals__.get("__name__") == home:
                found[prefix + name] = function.__code__
            elif isinstance(value, type) and value.__module__ == home and prefix.count(".") < 20:
                if f"{home}:{value.__qualname__}" == prefix + name:
                    pending.append((f"{prefix}{name}.", vars(value)))
    return found


def relies_on(fix: Any, target: str) -> set[str] | None:
    """The names of what a fix relies on here; None where it does not apply."""
    if not judge(fix.FIX.claims).fits:
        return None
    module = importlib.import_module(target)
    allowed = {_PACKAGES.get(name, name) for name in fix.FIX.claims} | {target.partition(".")[0]}
    _looked_up.clear()
    with Run(allowed) as run:
        broken = fix.broken(module)
    if not broken:
        return None
    ledger = Ledger(allowed)
    draft = ledger.draft(fix.FIX.id)
    fix.patch(module, draft)
    ledger.commit(draft)
    try:
        with run:
            still = fix.broken(module)
    finally:
        ledger.undo(fix.FIX.id)
    if still:
        raise RuntimeError("the probe still says broken after the patch")
    executed = run.names()
    places = [*_looked_up, *((entry.owner, entry.name) for entry in draft.entries)]
    found, roots = imported_by(fix, allowed), []
    for owner, attribute in places:
        named = name_at(owner, attribute)
        found.add(named)
        value = find(named) if named else None
        function = inner_function(value)
        if function is not None:
            roots.append((function, owner if isinstance(owner, type) else _class_of(named)))
        if isinstance(owner, type):
            found.add(f"{owner.__module__}:{owner.__qualname__}")
            found.add(name_at(owner, "__init__"))
    for function, owner in roots:
        found |= used_by(function, owner, allowed)
    for named in [*found]:  # whoever makes an object of a class relies on its constructor
        value = find(named) if named else None
        if isinstance(value, type):
            found.add(name_at(value, "__init__"))
    found |= executed
    return {named for named in found if named.partition(".")[0].partition(":")[0] in allowed}


def _class_of(named: str) -> Any:
    owner = find(named.rpartition(".")[0]) if "." in named.partition(":")[2] else None
    return owner if isinstance(owner, type) else None


def main(report: str, names: str = "") -> None:
    """Write ``fixes`` (id -> names), ``marks`` (name -> mark) and ``faults``."""
    fixes, faults = {}, {}
    for fix_id, (file, target) in INDEX.items():
        try:
            found = relies_on(importlib.import_module(f"diffusers_quantfix.fixes.{file}"), target)
        except Exception as error:
            faults[fix_id] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        if found is not None:
            fixes[fix_id] = sorted(found)
    files = Files()
    wanted = {named for found in fixes.values() for named in found}
    if names:
        wanted |= set(Path(names).read_text(encoding="utf-8").split())
        for module in {named.partition(":")[0] for named in wanted}:
            try:
                importlib.import_module(module)
            except Exception:
                continue
    marks = {}
    for named in sorted(wanted):
        value = find(named)
        marks[named] = mark(value, files) if value is not None else ""
    Path(report).write_text(json.dumps({"fixes": fixes, "marks": marks, "faults": faults}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
