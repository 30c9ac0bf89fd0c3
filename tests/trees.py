"""A copy of the project in a temporary folder, for tests of commands that write into its sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PARTS = ("diffusers_quantfix", "tests", "CHANGELOG.md", "README.md", "pyproject.toml")


class Tree:
    """A copy in which commands run, in processes that import nothing of the original."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for part in _PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / part, folder / part)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter in the copy."""
        variables = {**os.environ, "PYTHONPATH": str(self.folder), "HF_HUB_OFFLINE": "1", **environment}
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True, text=True, check=False, cwd=self.folder, env=variables, timeout=600,
        )  # fmt: skip

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def changed(self) -> list[str]:
        """The files that differ from the original, or are not in it."""
        ours = (path for part in _PARTS for path in sorted((self.folder / part).rglob("*")))
        names = [path.relative_to(self.folder) for path in ours if path.is_file() and path.suffix != ".pyc"]
        names += [Path(part) for part in _PARTS if (self.folder / part).is_file()]
        return [
            name.as_posix()
            for name in names
            if not (ROOT / name).exists() or (ROOT / name).read_bytes() != (self.folder / name).read_bytes()
        ]
