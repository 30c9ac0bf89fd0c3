"""The files that a fix consists of, and the places in them that are still stubs."""

from __future__ import annotations

from pathlib import Path

from diffusers_quantfix.fixes.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
MARK = "FILL IN"
INDEX_FILE, CHANGELOG = "diffusers_quantfix/fixes/index.py", "CHANGELOG.md"
ERRORS, RESULTS = "tests/tools/errors.txt", "tests/upstream/results.json"
PAGES = ("diffusers_quantfix/FIXES.md", "diffusers_quantfix/COMPATIBILITY.md")


def files_of(fix_id: str) -> list[str]:
    """The files of a fix that a person writes, but for the changelog."""
    name = fix_id.replace("-", "_")
    file = f"diffusers_quantfix/fixes/{TARGETS[fix_id].file.replace('.', '/')}.py"
    return [file, f"tests/fixes/test_{name}.py", f"diffusers_quantfix/verify/cases/{name}.py"]


def to_fill_in(names: list[str], root: Path = ROOT) -> list[str]:
    """The places that are still stubs, as ``FILE:LINE: what is missing``."""
    places = []
    for name in names:
        path = root / name
        for number, line in enumerate(path.read_text("utf-8").splitlines() if path.exists() else (), 1):
            if MARK in line:
                places.append(f"{name}:{number}: {line.strip()}")
    return places
