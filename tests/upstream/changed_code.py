"""What changed between two releases of a library in the code that fixes rely on, as diffs that a person can read.

Both releases are read from their sources, as `time_machine` reads them; nothing of them is imported or run.  A diff
shows what a fingerprint sees: no docstring and no line that is only a comment, and of a piece of which only the
interface counts no body.
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diffusers_quantfix.engine import fingerprint
from diffusers_quantfix.engine.code_marks import CALLED

from .source_marks import Sources, definitions, file_of, marks

LONGEST = 40  # lines of a diff that are shown


@dataclass(frozen=True)
class Release:
    """The sources of one release.

    Attributes:
        name: for people, as in "transformers 5.24.0".
        folder: the folder that has its packages.
    """

    name: str
    folder: Path

    @cached_property
    def _sources(self) -> Sources:
        return Sources(self.folder)

    def nodes(self, piece: str) -> list[ast.AST]:
        """The definitions of a piece; more than one where it stands under conditions."""
        return self._sources.find(piece)[1]

    def text(self, piece: str) -> list[str]:
        """The lines of a piece, as far as they count."""
        home, nodes = self._sources.find(piece)
        lines = file_of(self.folder, home).read_text(encoding="utf-8").splitlines() if nodes else []
        return [line for node in nodes for line in _shown(node, lines, piece.endswith(CALLED))]


def changed(pieces: Iterable[str], old: Release, new: Release) -> dict[str, list[str]]:
    """Of these pieces of code those that are not the same in two releases, each with the lines of its diff."""
    pieces = list(pieces)
    before, after = marks(old.folder, pieces), marks(new.folder, pieces)
    return {
        piece: diff(piece, old, new)
        for piece in pieces
        if piece in before and before[piece] != after.get(piece)
    }


def diff(piece: str, old: Release, new: Release) -> list[str]:
    """The diff of one piece; one line where it is gone, which says where it is now."""
    if not new.nodes(piece):
        name = piece.removesuffix(CALLED)
        place = moved_to(piece, old, new)
        return [f"{name} has moved to {place}" if place else f"{name} is gone"]
    lines = list(difflib.unified_diff(old.text(piece), new.text(piece), old.name, new.name, n=2, lineterm=""))
    if len(lines) > LONGEST:
        lines[LONGEST:] = [f"... and {len(lines) - LONGEST} more lines"]
    return lines


def moved_to(piece: str, old: Release, new: Release) -> str:
    """Where the same function is in another release, under its own name or in its own module; empty if nowhere."""
    nodes = old.nodes(piece)
    if len(nodes) != 1 or not isinstance(nodes[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    home, _, path = piece.removesuffix(CALLED).partition(":")
    last = path.rpartition(".")[2]
    proved = fingerprint.of_tree(nodes[0])
    package = new.folder / home.partition(".")[0]
    defines = re.compile(rf"^\s*(async )?def {re.escape(last)}\(", re.MULTILINE)
    for file in sorted(package.rglob("*.py"), key=lambda file: file != file_of(new.folder, home)):
        module = ".".join(file.relative_to(new.folder).with_suffix("").parts).removesuffix(".__init__")
        if module != home and not defines.search(file.read_text(encoding="utf-8", errors="replace")):
            continue
        for other, found in definitions(new.folder, module).items():
            if (module == home or other.rpartition(".")[2] == last) and any(
                fingerprint.of_function(node, last) == proved for node in found
            ):
                return f"{module}:{other}"
    return ""


def _shown(node: ast.AST, lines: list[str], called: bool) -> list[str]:
    """The lines of a definition without docstrings and comments."""
    if not isinstance(node, ast.stmt):
        return []
    decorators = [item.lineno for item in getattr(node, "decorator_list", ())]
    first, last = min([node.lineno, *decorators]), node.end_lineno or node.lineno
    hidden: set[int] = set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if called or isinstance(node, ast.ClassDef):
            last = max(node.body[0].lineno - 1, node.lineno)
            inner = getattr(node.body[0], "decorator_list", ())
            last = min([last, *(max(item.lineno - 1, node.lineno) for item in inner)])
        for inside in ast.walk(node):
            if _is_text(inside):
                hidden.update(range(inside.lineno, (inside.end_lineno or inside.lineno) + 1))
    shown = [
        line
        for number, line in enumerate(lines[first - 1 : last], first)
        if number not in hidden and line.strip() and not line.lstrip().startswith("#")
    ]
    text = textwrap.dedent("\n".join(shown)).splitlines()
    if called and isinstance(node, ast.FunctionDef) and node.name == "__init__":
        text += [f"    self.{name}" for name in sorted(fingerprint.given_to_self(node))]
    return text


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
