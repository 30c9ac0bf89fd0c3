"""What each fix relies on, found by running it, and the data file of the package that says so.

    python -m tests.upstream.proved_code --write

writes ``diffusers_quantfix/fixes/proved_code.json`` from the installed releases, which are to be the newest ones that
are claimed: for each fix that applies here, the pieces of code of the libraries that it relies on, and their marks
(`diffusers_quantfix.engine.code_marks`).  ``--report FILE`` writes the same for the release set in which it runs.

A fix relies on all of the code of

- what its draft writes to, and what its probe and its patch look up with `resolve`;

and on the interface of

- what its file imports of the libraries by name;
- the functions that its probe runs, before and after patching;
- what the functions of the first kind use of the same libraries, one level deep;
- the constructors of the classes among all these.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from diffusers_quantfix.engine import fingerprint, probe
from diffusers_quantfix.engine.code_marks import CALLED, Files, inner_function, is_opaque, mark
from diffusers_quantfix.engine.same_code import find
from diffusers_quantfix.engine.versions import installed_version, judge

DATA = Path(__file__).parents[2] / "diffusers_quantfix" / "fixes" / "proved_code.json"
# Of no function's code, or other ones in each process.
_NEVER = frozenset(
    (
        "__class__",
        "__dict__",
        "__doc__",
        "__file__",
        "__module__",
        "__name__",
        "__qualname__",
        "__version__",
        "logger",
    )
)
# Whether these apply is a matter of the processor as well: what they rely on was found on one with AVX512-BF16, and is
# kept where it is recorded elsewhere.
OF_A_PROCESSOR = frozenset(("bnb-cpu-avx512-scales", "bnb-cpu-packing", "bnb-cpu-packing-sharded"))
# What these return depends on their arguments only.
_PURE = frozenset(("dict", "frozenset", "list", "re.compile", "set", "tuple"))


class LookUps:
    """Every (owner, name) that is looked up through `probe.slot`, and found, while it is watched."""

    def __init__(self) -> None:
        self.places: list[tuple[Any, str]] = []
        self._original = probe.slot

    def __enter__(self) -> LookUps:
        def slot(owner: object, name: str) -> tuple[bool, Any]:
            found = self._original(owner, name)
            self.places.append((owner, name))
            return found

        probe.slot = slot
        return self

    def __exit__(self, *_: object) -> None:
        probe.slot = self._original


class Calls:
    """The functions of some libraries that run inside a block, in this thread."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages
        self._codes: dict[CodeType, str] = {}

    def __enter__(self) -> Calls:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in self._codes:
            home = frame.f_globals.get("__name__", "")
            if home.partition(".")[0] in self._packages:
                self._codes[frame.f_code] = home

    def names(self) -> set[str]:
        """Their names; not of those that are defined inside a function."""
        return {
            name
            for home in set(self._codes.values())
            for name, code in codes_of(home).items()
            if self._codes.get(code) == home
        }


def codes_of(home: str) -> dict[str, CodeType]:
    """The code of every function and method that a module defines, by name."""
    found: dict[str, CodeType] = {}
    pending = [(f"{home}:", vars(sys.modules[home]))] if home in sys.modules else []
    while pending:
        prefix, names = pending.pop()
        for name, value in list(names.items()):
            function = inner_function(value, _package(home))
            if function is not None and function.__globals__.get("__name__") == home:
                found[prefix + name] = function.__code__
            elif isinstance(value, type) and f"{value.__module__}:{value.__qualname__}" == prefix + name:
                pending.append((f"{prefix}{name}.", vars(value)))
    return found


def names_at(owner: Any, attribute: str) -> set[str]:
    """The names of what ``owner`` has: as it is looked up, and by the library that defines it where that is another.

    As it is looked up, since a release may import or inherit something else under the same name.
    """
    defined = name_at(owner, attribute)
    found = {defined}
    if isinstance(owner, ModuleType) and attribute in vars(owner):
        found.add(f"{owner.__name__}:{attribute}")
    elif (
        isinstance(owner, type)
        and find(home := f"{owner.__module__}:{owner.__qualname__}") is owner
        and defined
    ):
        found.add(f"{home}.{attribute}")
    looked_up = found - {defined}
    if looked_up and _package(defined.partition(":")[0]) == _package(next(iter(looked_up)).partition(":")[0]):
        return looked_up
    return found - {""}


def name_at(owner: Any, attribute: str) -> str:
    """The name of what ``owner`` has, by the module or class that defines it; empty where no name leads to it."""
    if isinstance(owner, FunctionType):  # its code is exchanged
        return "" if "<locals>" in owner.__qualname__ else f"{owner.__module__}:{owner.__qualname__}"
    if isinstance(owner, ModuleType):
        value = vars(owner).get(attribute)
        if isinstance(value, (FunctionType, type)):
            home = f"{value.__module__}:{value.__qualname__}"
            if "<locals>" not in home and find(home) is value:
                return home
        return f"{owner.__name__}:{attribute}"
    if isinstance(owner, type) and "<locals>" not in owner.__qualname__:
        base = next((base for base in owner.__mro__ if attribute in vars(base)), None)
        return f"{base.__module__}:{base.__qualname__}.{attribute}" if base else ""
    return ""


def used_by(function: FunctionType, owner: Any, packages: set[str]) -> set[str]:
    """The names of what a function uses of the libraries, one level deep.

    Args:
        function: its code is read, that of the functions inside it too.
        owner: the class that has it, whose methods it reaches through ``self``; None where there is none.
        packages: the libraries.
    """
    names = _in_head(function)
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    around = function.__globals__
    modules = [
        value
        for name in names
        if isinstance(value := around.get(name), ModuleType) and _package(value.__name__) in packages
    ]
    home = sys.modules.get(function.__module__)
    found = set()
    for name in names - _NEVER:
        if name in around and home is not None:
            if (
                _home(around[name], home) in packages
                and _is_the_same_everywhere(around[name])
                and not varies(name, around[name], home.__name__)
            ):
                found |= names_at(home, name)
        elif isinstance(owner, type) and inspect.getattr_static(owner, name, None) is not None:
            found.add(name_at(owner, name))
        else:
            for module in modules:
                found |= names_at(module, name) if name in vars(module) else set()
    return found


def _is_the_same_everywhere(value: Any) -> bool:
    """Whether a value of a module is code or a constant.

    An optional library, or whether there is one, depends on what else is installed, and the class of an object on the
    machine, as that of bitsandbytes' native library does.
    """
    if isinstance(value, (ModuleType, bool, type(None))):
        return False
    code = isinstance(value, type) or inner_function(value) is not None
    return code or not is_opaque(value)


def varies(name: str, value: Any, home: str) -> bool:
    """Whether a value of a module that is no code depends on the machine, or on what was imported or run before.

    So do the result of a call, as the devices that diffusers finds are, and what is filled later, as the prefixes of
    PEFT's methods are.  A list of the library's own code, as of the classes that have single files, is left out too:
    one more is no change.

    Args:
        name: of the value.
        value: of the module.
        home: the module that has it, by import too.
    """
    if isinstance(value, (FunctionType, ModuleType, type)):
        return False
    if isinstance(value, (list, set, dict)) and (not value or _has_code(value)):
        return True
    for module_name, module in sys.modules.copy().items():
        if _package(module_name) != _package(home) or not isinstance(module, ModuleType):
            continue
        if vars(module).get(name) is value:
            definition = _assigned(str(getattr(module, "__file__", "")), name)
            if definition is not None:
                return _is_empty(definition) or any(map(_is_call, ast.walk(definition)))
    return False


def _has_code(value: Any) -> bool:
    if isinstance(value, type) or inner_function(value) is not None:
        return True
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list, set, tuple)) and any(map(_has_code, inside))


@functools.cache
def _assigned(file: str, name: str) -> ast.expr | None:
    """What a module, outside of functions and conditions, assigns to a name; None where there is no such statement."""
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    for node in reversed(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return getattr(node, "value", None)
    return None


def _is_empty(display: ast.expr) -> bool:
    return isinstance(display, (ast.Dict, ast.List)) and not (
        display.keys if isinstance(display, ast.Dict) else display.elts
    )


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) not in _PURE


def _in_head(function: FunctionType) -> set[str]:
    """The names in the decorators and defaults of a function, which its code does not have."""
    code = function.__code__
    try:
        tree = fingerprint.definition(Files().block(code.co_filename, code.co_firstlineno))
    except Exception:  # generated, or a lambda
        return set()
    if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return set()
    heads = (*tree.decorator_list, *tree.args.defaults, *filter(None, tree.args.kw_defaults))
    nodes = [node for head in heads for node in ast.walk(head)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return {name for name in names if not name.endswith(("DOCSTRING", "DOC_STRING"))}


def imported_by(fix: ModuleType, packages: set[str]) -> set[str]:
    """The names of what the file of a fix imports of the libraries."""
    found = set()
    for node in ast.walk(ast.parse(Path(str(fix.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module = sys.modules.get(node.module)
            if module is not None and _package(node.module) in packages:
                for alias in node.names:
                    found |= names_at(module, alias.name) if alias.name in vars(module) else set()
    return found


def relies_on(name: str, fix: Any, module: Any, claims: dict[str, str]) -> set[str] | None:
    """The names of what a fix relies on in the installed releases; None where it does not apply.

    Args:
        name: of the target.
        fix: the module of the fix: ``broken``, ``patch``.
        module: the target.
        claims: of the target.

    Raises:
        RuntimeError: the probe still says broken after the patch.
    """
    from diffusers_quantfix.engine.ledger import Ledger
    from diffusers_quantfix.fixes.targets import PACKAGES

    packages = {PACKAGES.get(name, name) for name in claims} | {_package(module.__name__)}
    calls = Calls(packages)
    ledger = Ledger(packages)
    with LookUps() as looked_up:
        with calls:
            broken = fix.broken(module)
        if not broken:
            return None
        draft = ledger.draft(name)
        fix.patch(module, draft)
    ledger.commit(draft)
    try:
        with calls:
            still_broken = not fix.FIX.asked_once and fix.broken(module)
    finally:
        ledger.undo(name)
    if still_broken:
        raise RuntimeError("the probe still says broken after the patch")
    places = [*looked_up.places, *((entry.owner, entry.name) for entry in draft.entries)]
    whole = {
        name for owner, attribute in places if attribute not in _NEVER for name in names_at(owner, attribute)
    }
    called = imported_by(fix, packages) | calls.names()
    for owner, attribute in places:
        piece = name_at(owner, attribute)
        function = inner_function(find(piece), _package(piece))
        if function is not None:
            called |= used_by(function, owner if isinstance(owner, type) else _class_of(piece), packages)
        if isinstance(owner, type):
            whole.add(f"{owner.__module__}:{owner.__qualname__}")
    for piece in {*whole, *called} - {""}:
        value = find(piece)
        if isinstance(value, type):
            called.add(name_at(value, "__init__"))
    found = whole | {piece + CALLED for piece in called - whole if piece}
    return {piece for piece in found if _package(piece.partition(":")[0]) in packages}


def record() -> dict[str, Any]:
    """``fixes`` (name of a target -> pieces), ``marks`` (piece -> mark), ``releases``, ``faults``."""
    from diffusers_quantfix.fixes import DISTRIBUTIONS

    fixes, faults = {}, {}
    for name, file, target, claims in _targets():
        try:
            if not judge(claims).fits:
                continue
            fix = importlib.import_module(f"diffusers_quantfix.fixes.{file}")
            found = relies_on(name, fix, importlib.import_module(target), claims)
        except Exception as error:
            faults[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        if found is None and name in OF_A_PROCESSOR:
            found = recorded().get(name)
        if found is not None:
            fixes[name] = sorted(found)
    files = Files()
    marks = {}
    for piece in sorted({piece for found in fixes.values() for piece in found}):
        marks[piece] = mark(piece, find(piece.removesuffix(CALLED)), files)
    releases = {name: installed_version(name) for name in DISTRIBUTIONS}
    return {"releases": releases, "fixes": fixes, "marks": marks, "faults": faults}


def recorded() -> dict[str, set[str]]:
    """Name of a target -> the pieces that it relies on, as the data file says."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    names = list(data["pieces"])
    return {
        target: {names[int(number)] for number in numbers.split()}
        for target, numbers in data["targets"].items()
    }


def written(report: dict[str, Any]) -> str:
    """The data file: the pieces, those of one module together, and for each target the numbers of its pieces; one
    entry a line."""
    numbers = {piece: number for number, piece in enumerate(report["marks"])}
    parts = {
        "releases": report["releases"],
        "pieces": report["marks"],
        "targets": {
            name: " ".join(str(numbers[piece]) for piece in pieces)
            for name, pieces in report["fixes"].items()
        },
    }
    blocks = []
    for title, entries in parts.items():
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        blocks.append(f"{json.dumps(title)}: {{\n{rows}\n}}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def not_the_newest() -> str:
    """What is installed that is not the newest release of its library that all fixes were tested with, as a phrase."""
    from diffusers_quantfix.fixes import TESTED

    # Of torch the README's environment has an older one: the code of a fix is the same in a newer one, or not.
    wrong = [
        f"{name} {installed_version(name) or 'none'} instead of {newest}"
        for name, newest in TESTED.items()
        if name != "torch" and installed_version(name) != newest
    ]
    command = 'pip install -c tests/constraints.txt -e ".[stack,backends,test]"'
    return f"here are {', '.join(wrong)}: `{command}`" if wrong else ""


def _targets() -> list[tuple[str, str, str, dict[str, str]]]:
    from diffusers_quantfix.fixes.targets import TARGETS

    return [(name, target.file, target.module, target.claims) for name, target in TARGETS.items()]


def _package(module: str) -> str:
    return module.partition(".")[0]


def _home(value: Any, home: ModuleType) -> str:
    """The library of a value: of a constant the one whose module has it."""
    inner = inner_function(value) or value
    return _package(str(inner.__module__ if isinstance(inner, (FunctionType, type)) else home.__name__))


def _class_of(piece: str) -> Any:
    """The class of a method, by its name; None for other pieces."""
    owner = find(piece.rpartition(".")[0]) if "." in piece.partition(":")[2] else None
    return owner if isinstance(owner, type) else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream.proved_code", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the data file of the package")
    what.add_argument("--report", type=Path, help="write a report on this release set, as JSON")
    arguments = parser.parse_args()
    if os.environ.get("DIFFUSERS_QUANTFIX") != "off":  # before any library is imported
        command = [sys.executable, "-m", "tests.upstream.proved_code", *sys.argv[1:]]
        return subprocess.run(
            command, env={**os.environ, "DIFFUSERS_QUANTFIX": "off"}, check=False
        ).returncode
    if arguments.write and (others := not_the_newest()):
        print(f"error: only the newest releases that are claimed are recorded; {others}", file=sys.stderr)
        return 2
    report = record()
    for name, fault in report["faults"].items():
        print(f"{name}: {fault}", file=sys.stderr)
    if arguments.report:
        arguments.report.write_text(json.dumps(report, indent=1), encoding="utf-8")
    else:
        DATA.write_text(written(report), encoding="utf-8")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
