"""``explain ID --script`` and ``--report``: what upstream needs to reproduce a bug, without this package.

The script is built from the case that `verify` runs: every function that the case uses, its own and those of the tiny
models, in one file.
"""

from __future__ import annotations

import ast
import importlib.util
import platform
import re

from ..engine.versions import installed_version
from ..fixes import DISTRIBUTIONS
from ..fixes.targets import declaration
from ..text import wrapped
from .pages import affected, target_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PACKAGE = __name__.partition(".")[0]
_MAIN = """
if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print(case(folder) or "no bug")
"""


class NoScript(Exception):
    """A case that needs this package; the text is the error message."""


class _Module:
    """One of our modules: its top-level definitions, and the names in it that refer to other modules."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tree = ast.parse(_source(name))
        self.defined: dict[str, ast.stmt] = {}
        self.imports: list[ast.stmt] = []  # of modules of other packages, at the top level
        self.meant: dict[
            str, tuple[str, str]
        ] = {}  # a name -> (module of ours, a name in it or "" for itself)
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.defined[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and target.id != "TYPE_CHECKING":
                        self.defined[target.id] = node
            elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
                self.imports.append(node)
        for found in ast.walk(self.tree):
            if isinstance(found, ast.ImportFrom) and found.level:
                base = ".".join(self.name.split(".")[: -found.level])
                base = ".".join(part for part in (base, found.module) if part)
                for alias in found.names:
                    inner = f"{base}.{alias.name}"
                    here = alias.asname or alias.name
                    self.meant[here] = (inner, "") if _is_module(inner) else (base, alias.name)


class _Rename(ast.NodeTransformer):
    """Replace names of our modules by those of the script, and remove imports of our modules."""

    def __init__(self, module: _Module, names: dict[tuple[str, str], str]) -> None:
        self._module = module
        self._names = names
        self._locals: frozenset[str] = frozenset()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.level else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name):
            module, inner = self._module.meant.get(node.value.id, ("", ""))
            name = self._names.get((module, node.attr)) if module and not inner else None
            if name:
                return ast.copy_location(ast.Name(name, node.ctx), node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._locals:
            return node
        meant = self._module.meant.get(node.id)
        key = meant if meant and meant[1] else (self._module.name, node.id)
        node.id = self._names.get(key, node.id)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return ast.Pass()
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None  # types of ours, and of libraries that may not be installed
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        outer, self._locals = self._locals, self._locals | _locals_of(node)
        self.generic_visit(node)
        self._locals = outer
        if not node.body:  # it contained only an import of ours
            node.body = [ast.Pass()]
        return node


def script(fix_id: str) -> str:
    """A program that reproduces the bug of a fix on the installed releases, without this package.

    Args:
        fix_id: its id, or the name of one of its targets.

    Raises:
        NoScript: the case needs this package.
    """
    case = f"{_PACKAGE}.verify.cases.{target_of(fix_id).name.replace('-', '_')}"
    modules: dict[str, _Module] = {}
    reached = _reached(case, modules)
    names: dict[tuple[str, str], str] = {}
    for module, name in reached:
        # A local variable often has the name of the function that created it: ``transformer = flux.transformer()``.
        own = module == case or not name.islower()
        private = "_" if name.startswith("_") else ""
        names[module, name] = name if own else f"{private}{module.rpartition('.')[2]}_{name.lstrip('_')}"
    if _takes_modules(modules, reached):
        raise NoScript(f"the case of {fix_id} changes this package, so it cannot run without it")
    imports: dict[str, None] = {}
    parts: list[str] = []
    # Definitions come before their uses: the case uses its models, and those use others.
    for module in reversed(list(dict.fromkeys(module for module, _ in reached))):
        tree = modules[module]
        imports.update((ast.unparse(node), None) for node in tree.imports)
        wanted = {id(tree.defined[name]) for inner, name in reached if inner == module}
        for node in tree.tree.body:
            if id(node) in wanted:
                renamed = _Rename(tree, names).visit(node)
                if isinstance(renamed, (ast.FunctionDef, ast.ClassDef)):
                    renamed.name = names[module, renamed.name]
                parts.append(ast.unparse(ast.fix_missing_locations(renamed)))
    body = "\n\n\n".join(parts)
    used = [line for line in imports if re.search(rf"\b{re.escape(line.split()[-1])}\b", body)]
    return "\n\n".join([_head(fix_id), *(["\n".join(used)] if used else []), f"\n{body}\n{_MAIN}"])


def report(fix_id: str) -> str:
    """The text of an issue for upstream."""
    fix = declaration(fix_id)
    described = "\n\n".join(f"{part}: {fix.section(part)}" for part in ("Symptom", "Cause"))
    claims = affected(target_of(fix_id).claims)
    return (
        f"{fix.title}\n\n### Describe the bug\n\n{described}\n\nSeen with {claims}.\n\n### Reproduction\n\n"
        f"```python\n{script(fix_id)}```\n\n### System info\n\n{_versions()}; Python {platform.python_version()}, "
        f"{platform.platform()}\n"
    )


def _takes_modules(modules: dict[str, _Module], reached: list[tuple[str, str]]) -> bool:
    """Whether one of our modules is used as a value, not only for what it defines."""
    for module, name in reached:
        one = modules[module]
        tree = one.defined[name]
        owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Name)
                and id(node) not in owners
                and one.meant.get(node.id, ("", "x"))[1] == ""
            ):
                return True
    return False


def _locals_of(function: ast.FunctionDef) -> set[str]:
    """The names that a function binds, which hide those of its module; imports of our modules do not count."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            found.difference_update(node.names)
    return found


def _reached(case: str, modules: dict[str, _Module]) -> list[tuple[str, str]]:
    """(module, name) of everything that the case uses, itself first; also fills ``modules``."""
    reached: dict[tuple[str, str], None] = {}
    pending = [(case, "case")]
    while pending:
        module, name = pending.pop(0)
        if module not in modules:
            modules[module] = _Module(module)
        one = modules[module]
        if name not in one.defined:
            if name in one.meant:  # imported from another module
                pending.append(one.meant[name])
            continue
        if (module, name) in reached:
            # Move it after the last definition that needs it.
            reached[module, name] = reached.pop((module, name))
            continue
        reached[module, name] = None
        for node in ast.walk(one.defined[name]):
            if isinstance(node, ast.Name):
                meant = one.meant.get(node.id)
                if node.id in one.defined:
                    pending.append((module, node.id)) if node.id != name else None
                elif meant and meant[1]:
                    pending.append(meant)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                meant = one.meant.get(node.value.id)
                if meant and not meant[1]:
                    pending.append((meant[0], node.attr))
    return list(reached)


def _head(fix_id: str) -> str:
    fix = declaration(fix_id)
    claims = affected(target_of(fix_id).claims)
    lines = [f'"""{fix.title}.', ""]
    lines += wrapped(
        "Where the bug exists, this raises the error of the library, or an AssertionError with the figures."
    )
    lines += ["", *wrapped(f"affected: {claims}"), *wrapped(f"here: {_versions()}")]
    lines += [f"upstream: {link}" for link in fix.upstream or ("not reported yet",)]
    return "\n".join([*lines, '"""'])


def _versions() -> str:
    found = ((name, installed_version(name)) for name in DISTRIBUTIONS if name not in ("wrapt", "packaging"))
    return ", ".join(f"{name} {version}" for name, version in found if version) or "none of the libraries"


def _source(name: str) -> str:
    spec: Any = importlib.util.find_spec(name)
    return str(spec.loader.get_source(name))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False
