"""Removes a fix from every file, and finds what else names it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from diffusers_quantfix.fixes import FIXES
from diffusers_quantfix.fixes.targets import TARGETS

from .files import CHANGELOG, ERRORS, INDEX_FILE, PAGES, RESULTS, ROOT, files_of


def remove(fix_id: str, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Take a fix out.

    Returns:
        The files that were changed or deleted, and the places that still name the fix, as ``FILE:LINE: text``.

    Raises:
        ValueError: there is no such fix, or it is one target of a fix; nothing is changed then.
    """
    if fix_id not in FIXES:
        of = f"; it is a target of {TARGETS[fix_id].fix}: delete it in its file" if fix_id in TARGETS else ""
        raise ValueError(f"there is no fix {fix_id}{of}")
    names = FIXES[fix_id]
    changed = []
    for name in dict.fromkeys(file for one in names for file in files_of(one)):
        marks = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', _read(root / name))) & set(TARGETS)
        if (root / name).exists() and not (name.startswith("tests/") and marks - set(names)):
            (root / name).unlink()
            changed.append(name)
    for name, without in ((CHANGELOG, _without_lines), (ERRORS, _without_block), (RESULTS, _without_row)):
        text = before = _read(root / name)
        for one in dict.fromkeys((fix_id, *names)):
            text = without(text, one)
        if text != before:
            (root / name).write_text(text, encoding="utf-8")
            changed.append(name)
    for module in ("tests.index", "tests.upstream.tables"):
        subprocess.run([sys.executable, "-m", module, "--write"], cwd=root, check=True)
    return [*changed, INDEX_FILE, *PAGES], _named(names, root)


def _read(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def _without_lines(text: str, name: str) -> str:
    """The changelog without the entry that begins with this name."""
    return re.sub(rf"(?m)^- `{name}`:.*\n(?:  .*\n)*", "", text)


def _without_block(text: str, name: str) -> str:
    return re.sub(rf"(?ms)^=== {name} \(.*?(?=^=== |\Z)", "", text)


def _without_row(text: str, name: str) -> str:
    rows = json.loads(text)
    if name not in rows:
        return text
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(f'"{name}": ')]
    return re.sub(r",(\n\}\n)\Z", r"\1", "".join(lines))


def _named(names: Iterable[str], root: Path) -> list[str]:
    """The lines of the project that name one of these targets, or its files."""
    words = re.compile(
        "|".join(rf"(?<![\w-])({name}|test_{name.replace('-', '_')})(?![\w-])" for name in names)
    )
    places = []
    for part in ("diffusers_quantfix", "tests", "CHANGELOG.md", "README.md"):
        paths = sorted((root / part).rglob("*")) if (root / part).is_dir() else [root / part]
        for path in paths:
            if path.suffix in (".py", ".md", ".txt", ".json", ".toml") and path.is_file():
                for number, line in enumerate(_read(path).splitlines(), 1):
                    if words.search(line):
                        places.append(f"{path.relative_to(root).as_posix()}:{number}: {line.strip()[:100]}")
    return places
