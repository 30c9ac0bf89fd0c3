"""Fingerprints of the code on which the fixes rely, in the sources of the installed libraries.

Any change that can matter is noticed, no rewriting is, and each Python on this machine says the same of them.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from diffusers_quantfix.engine import fingerprint
from diffusers_quantfix.engine.code_marks import CALLED
from tests.engine.mutations import KINDS, REWRITINGS, mutated, rewritten, without_texts

from .proved_code import DATA
from .run_cell import ROOT
from .source_marks import definitions, file_of, marks

PIECES = sorted(json.loads(DATA.read_text(encoding="utf-8"))["pieces"])
SITE = Path(importlib.util.find_spec("diffusers").origin).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SHOW = "import json, sys; from pathlib import Path; from tests.upstream.source_marks import marks; " \
       "print(json.dumps([sys.version_info[:2], marks(Path(sys.argv[1]), json.load(sys.stdin))]))"  # fmt: skip


@cache
def texts() -> list[str]:
    """The text of each function and class that is recorded, without the indentation that it has in its class."""
    found = []
    trees: dict[str, dict[str, list[ast.AST]]] = {}
    for home, _, path in sorted({piece.removesuffix(CALLED).partition(":") for piece in PIECES}):
        if home not in trees:
            trees[home] = definitions(SITE, home)
        lines = file_of(SITE, home).read_text(encoding="utf-8").splitlines(True) if trees[home] else []
        for node in trees[home].get(path, ()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
                text = textwrap.dedent(fingerprint.block_at(lines, first))
                if not _has_lines_in_strings(text):
                    found.append(text)
    return found


def _has_lines_in_strings(text: str) -> bool:
    """Whether to dedent it has changed a string that is no docstring."""
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value
        for node in ast.walk(without_texts(ast.parse(text).body[0]))
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_noticed(kind):
    rng = random.Random(kind)
    count = 0
    for text in rng.sample(texts(), len(texts())):
        if count == 150:
            break
        bare = without_texts(ast.parse(text).body[0])
        changed = mutated(bare, kind, rng)
        if changed is not None:
            assert fingerprint.of_tree(bare) != fingerprint.of_tree(changed), ast.unparse(changed)
            count += 1
    assert count >= 20, count


@pytest.mark.long
@pytest.mark.parametrize("way", REWRITINGS)
def test_no_rewriting_is(way):
    rng = random.Random(way)
    count = 0
    for text in rng.sample(texts(), len(texts())):
        if count == 300:
            break
        other = rewritten(text, way, rng)
        if other is not None:
            assert fingerprint.of_text(text) == fingerprint.of_text(other), other
            count += 1
    assert count >= 200, count


def interpreters() -> dict[str, str]:
    """Version -> the interpreters of pyenv on this machine."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = {version: sorted(root.glob(f"versions/{version}.*/bin/python")) for version in PYTHONS}
    return {version: str(paths[-1]) for version, paths in found.items() if paths}


@pytest.mark.long
@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_says_the_same(version):
    if version not in interpreters():
        pytest.skip(f"this machine has no Python {version}")
    done = subprocess.run(
        [interpreters()[version], "-B", "-c", SHOW, str(SITE)],
        input=json.dumps(PIECES), cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DIFFUSERS_QUANTFIX": "off"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said, found = json.loads(done.stdout)
    assert said == [int(part) for part in version.split(".")]
    here = marks(SITE, PIECES)
    assert len(here) > 800
    assert found == here
    assert (sys.version_info[:2] == tuple(said)) == (
        version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    )
