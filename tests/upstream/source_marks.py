"""The marks of pieces of code in the sources of a release, which is not installed, imported or run.

The fingerprints are those of `diffusers_quantfix.engine.code_marks`; only their first two parts, which depend on the
text, are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diffusers_quantfix.engine import fingerprint
from diffusers_quantfix.engine.code_marks import CALLED

Definitions = dict[str, list[ast.AST]]
Imports = dict[str, tuple[str, str]]
_BLOCKS = ("body", "orelse", "finalbody")


class Sources:
    """The modules below a folder, parsed when they are asked for.

    Args:
        folder: that has the packages of a release.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, tuple[Definitions, Imports]] = {}

    def of(self, home: str) -> tuple[Definitions, Imports]:
        """What a module defines, by dotted path, and what it imports: name -> (module, name there)."""
        if home not in self._modules:
            self._modules[home] = _read(self.folder, home)
        return self._modules[home]

    def find(self, piece: str) -> tuple[str, list[ast.AST]]:
        """The module that has a piece, by import or inheritance too, and the definitions there.

        More than one where they stand under conditions; none where it is not of this library or cannot be found.
        """
        home, _, path = piece.removesuffix(CALLED).partition(":")
        return self._find(home, path, 8)

    def _find(self, home: str, path: str, depth: int) -> tuple[str, list[ast.AST]]:
        defined, imported = self.of(home)
        if path in defined or not depth:
            return home, defined.get(path, [])
        first, _, rest = path.partition(".")
        below = f".{rest}" if rest else ""
        if first in imported:
            module, name = imported[first]
            if module.partition(".")[0] != home.partition(".")[0]:
                return home, []
            if not name or file_of(self.folder, f"{module}.{name}").exists():  # a module
                return (
                    self._find(f"{module}.{name}" if name else module, rest, depth - 1)
                    if rest
                    else (home, [])
                )
            return self._find(module, f"{name}{below}", depth - 1)
        for node in defined.get(first, ()) if rest else ():
            for base in getattr(node, "bases", ()):
                if isinstance(base, ast.Name):
                    found = self._find(home, f"{base.id}{below}", depth - 1)
                    if found[1]:
                        return found
        return home, []


def marks(folder: Path, pieces: Iterable[str]) -> dict[str, str]:
    """The fingerprints of those of ``pieces`` that the sources below ``folder`` define.

    A piece that is defined more than once, under conditions, has the fingerprints of all its definitions.
    """
    found, read = {}, Sources(folder)
    for piece in pieces:
        nodes = read.find(piece)[1]
        if nodes:
            print_of = fingerprint.of_interface if piece.endswith(CALLED) else fingerprint.of_tree
            found[piece] = "+".join(print_of(_head(node)) for node in nodes)
    return found


def definitions(folder: Path, module: str) -> Definitions:
    """What a module defines, by dotted path; nothing where it is not there or cannot be parsed."""
    return _read(folder, module)[0]


def _read(folder: Path, module: str) -> tuple[Definitions, Imports]:
    file = file_of(folder, module)
    try:
        tree = fingerprint.module(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}, {}
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: Definitions = {}
    imported: Imports = {}
    pending: list[tuple[list[Any], str]] = [(tree.body, "")]
    while pending:
        body, prefix = pending.pop()
        for node in _statements(body):
            for name in _names(node):
                found.setdefault(prefix + name, []).append(node)
            if isinstance(node, ast.ClassDef):
                pending.append((node.body, f"{prefix}{node.name}."))
            elif not prefix and isinstance(node, ast.ImportFrom):
                steps = package.split(".")
                steps = steps[: len(steps) - node.level + 1] if node.level else []
                source = ".".join([*steps, *([node.module] if node.module else [])])
                imported |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
            elif not prefix and isinstance(node, ast.Import):
                imported |= {alias.asname: (alias.name, "") for alias in node.names if alias.asname}
    return found, imported


def file_of(folder: Path, module: str) -> Path:
    """The file of a module in the sources below ``folder``, which need not be there."""
    base = folder.joinpath(*module.split("."))
    file = base.with_suffix(".py")
    return file if file.exists() else base / "__init__.py"


def _statements(body: list[Any]) -> Iterator[Any]:
    """The statements of a block, those below its conditions too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for block in (*_BLOCKS, "handlers"):
                yield from _statements(getattr(node, block, []))
        elif isinstance(node, ast.ExceptHandler):
            yield from _statements(node.body)


def _names(node: Any) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _head(node: ast.AST) -> ast.AST:
    """Of a class what its mark says: bases, metaclass, decorators, slots and the names of its special methods."""
    if not isinstance(node, ast.ClassDef):
        return node
    inside = list(_statements(node.body))
    methods = {
        name
        for one in inside
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (name := one.name)[:2] == "__" == name[-2:]
        and name not in ("__repr__", "__str__")
    }
    slots = [one.value for one in inside if isinstance(one, ast.Assign) and "__slots__" in _names(one)]
    words = [ast.Constant(name) for name in sorted(methods)]
    keywords = [keyword.value for keyword in node.keywords]
    parts = [
        ast.Tuple(list(part), ast.Load())
        for part in (node.bases, keywords, node.decorator_list, slots, words)
    ]
    return ast.Tuple(parts, ast.Load())
