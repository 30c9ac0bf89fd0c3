"""The marks of pieces of code in the sources of a release, which is not installed, imported or run.

The fingerprints are those of `diffusers_quantfix.engine.same_code`; only their first two parts, which depend on the
text, are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diffusers_quantfix.engine import fingerprint
from diffusers_quantfix.engine.same_code import CALLED

_BLOCKS = ("body", "orelse", "finalbody")


def marks(folder: Path, pieces: Iterable[str]) -> dict[str, str]:
    """The fingerprints of those of ``pieces`` that the sources below ``folder`` define.

    A piece that is defined more than once, under conditions, has the fingerprints of all its definitions.
    """
    found, trees = {}, {}
    for piece in pieces:
        home, _, path = piece.removesuffix(CALLED).partition(":")
        if home not in trees:
            trees[home] = definitions(folder, home)
        nodes = trees[home].get(path)
        if nodes:
            print_of = fingerprint.of_interface if piece.endswith(CALLED) else fingerprint.of_tree
            found[piece] = "+".join(print_of(_bases(node)) for node in nodes)
    return found


def definitions(folder: Path, module: str) -> dict[str, list[ast.AST]]:
    """What a module defines, by dotted path; nothing where it is not there or cannot be parsed."""
    try:
        tree = fingerprint.module(file_of(folder, module).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    found: dict[str, list[ast.AST]] = {}
    pending: list[tuple[list[Any], str]] = [(tree.body, "")]
    while pending:
        body, prefix = pending.pop()
        for node in _statements(body):
            for name in _names(node):
                found.setdefault(prefix + name, []).append(node)
            if isinstance(node, ast.ClassDef):
                pending.append((node.body, f"{prefix}{node.name}."))
    return found


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


def _bases(node: ast.AST) -> ast.AST:
    """Of a class what its mark says, the bases."""
    return ast.Tuple(node.bases, ast.Load()) if isinstance(node, ast.ClassDef) else node
