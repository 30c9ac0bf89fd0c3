"""One virtual environment per release set, built by uv, kept in a cache folder, shared by all drivers.

The folder of an environment is named after the hash of its pins, so a changed row gets a new one.  A file lock makes
the second driver wait for the first; a marker that is written last tells a whole environment from an interrupted one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .cells import Cell

CACHE_VARIABLE = "DIFFUSERS_QUANTFIX_CELLS"
_COMPLETE = "complete"


class CannotInstall(Exception):
    """A release set that cannot be had; the message names the requirement."""


def cache_folder() -> Path:
    """Where environments, logs and results are kept: ``$DIFFUSERS_QUANTFIX_CELLS``, else in the user's cache."""
    asked = os.environ.get(CACHE_VARIABLE)
    if asked:
        return Path(asked).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffusers-quantfix-cells"


def find_uv() -> list[str]:
    """The command of uv: beside this interpreter, on PATH, or ``python -m uv``.

    Raises:
        CannotInstall: there is none.
    """
    beside = Path(sys.executable).with_name("uv")
    for found in (str(beside) if beside.exists() else None, shutil.which("uv")):
        if found:
            return [found]
    command = [sys.executable, "-m", "uv"]
    if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
        return command
    raise CannotInstall("uv was not found; `python -m pip install uv` puts it beside this interpreter")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock across processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Environment:
    """A finished environment.

    Attributes:
        python: its interpreter.
        variables: what its processes need in their environment.
    """

    def __init__(self, python: Path, variables: dict[str, str]) -> None:
        self.python = python
        self.variables = variables


def is_ready(cell: Cell, folder: Path) -> bool:
    """Whether the environment of a cell stands there whole."""
    return (folder / "environments" / cell.key / _COMPLETE).exists()


def prepare(cell: Cell, folder: Path, log: Path) -> Environment:
    """The environment of a cell, from the cache or freshly built.

    Raises:
        CannotInstall: with the requirement that failed.
    """
    if not cell.alone:
        return Environment(_venv(cell.python, cell.requirements, folder / "environments" / cell.key, log), {})
    # A range: one environment for what all its cells have, and a folder per release beside it.
    beside = [line for line in cell.requirements if not line.startswith(f"{cell.alone}==")]
    base = Cell(f"{cell.alone}-base", cell.python, dict(line.split("==") for line in beside))
    python = _venv(cell.python, beside, folder / "environments" / base.key, log)
    site = folder / "environments" / cell.key
    with locked(site.with_suffix(".lock")):
        if not (site / _COMPLETE).exists():
            shutil.rmtree(site, ignore_errors=True)
            only = f"{cell.alone}=={cell.pins[cell.alone]}"
            _uv(["pip", "install", "-p", str(python), "--no-deps", "--target", str(site), only], [only], log)
            (site / _COMPLETE).touch()
    return Environment(python, {"PYTHONPATH": str(site)})


def resolve(cell: Cell, log: Path) -> dict[str, str]:
    """The releases that the registry has now for a cell, those without a pin too: name -> release.

    Raises:
        CannotInstall: with the requirement that failed.
    """
    arguments = ["pip", "compile", "-q", "--no-header", "--no-annotate", "--upgrade", *_find_links(),
                 "-p", _interpreter(cell.python), "-"]  # fmt: skip
    text = _uv(arguments, cell.requirements, log, stdin="\n".join(cell.requirements))
    found = (line.partition("==") for line in text.splitlines() if "==" in line)
    return {name.strip(): release.split(";")[0].strip() for name, _, release in found}


def sources(library: str, release: str, folder: Path) -> Path:
    """The files of one release, downloaded once, not installed and without what it requires.

    Args:
        library: name of the distribution.
        release: of it.
        folder: where environments and results are kept.

    Raises:
        CannotInstall: with the requirement that failed.
    """
    home = folder / "sources" / library / release
    with locked(home.with_suffix(f"{home.suffix}.lock")):
        if not (home / _COMPLETE).exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            only = f"{library}=={release}"
            arguments = [
                "pip",
                "install",
                "-p",
                sys.executable,
                "--no-deps",
                *_find_links(),
                "--target",
                str(home),
            ]
            _uv([*arguments, only], [only], folder / "sources" / "log")
            (home / _COMPLETE).touch()
    return home


def _venv(python: str, requirements: list[str], home: Path, log: Path) -> Path:
    executable = home / "bin" / "python"
    with locked(home.with_suffix(".lock")):
        if not (home / _COMPLETE).exists():
            shutil.rmtree(home, ignore_errors=True)
            _uv(["venv", "-p", _interpreter(python), str(home)], [f"python {python}"], log)
            _uv(["pip", "install", "-p", str(executable), *_find_links(), *requirements], requirements, log)
            (home / _COMPLETE).touch()
    return executable


def _interpreter(version: str) -> str:
    """This interpreter if it is of that version, else pyenv's, whose shims uv cannot use, else what uv finds."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return next((str(found) for found in pyenv.glob(f"versions/{version}.*/bin/python")), version)


def _find_links() -> list[str]:
    """pip's setting for local wheels, in uv's words (uv does not read pip's)."""
    return [
        word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)
    ]


def _uv(arguments: list[str], requirements: list[str], log: Path, stdin: str = "") -> str:
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never", "NO_COLOR": "1"}
    done = subprocess.run(
        [*find_uv(), *arguments],
        input=stdin, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ uv {' '.join(arguments)}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        raise CannotInstall(blame(done.stderr, requirements))
    return done.stdout


def blame(stderr: str, requirements: list[str]) -> str:
    """One sentence from uv's complaint, with the requirement that it names first."""
    text = " ".join(re.sub(r"[×╰├│▶─]+", " ", stderr).split())
    at = {}
    for line in requirements:
        found = re.search(rf"(?<![\w-]){re.escape(line)}(?![\w.])", text)
        if found:
            at[found.start()] = line
    said = text
    for start in (r"Because .*?(?= hint:|$)", r"error: .*"):
        if reason := re.search(start, text):
            said = reason.group()
            break
    named = [at[position] for position in sorted(at)]
    head = f"cannot install {' with '.join(dict.fromkeys(named))}" if named else "cannot be installed"
    return f"{head}: {said[:600]}"
