"""Runs a program in a process of its own, with the package or without it.

With the package the devices of the rig take time (`tests.rig.late`), on the newest releases.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import rig
from tests.gate import unmet
from tests.programs import processes
from tests.programs.processes import Hung

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PYTHON = os.environ.get("DIFFUSERS_QUANTFIX_PROGRAMS_PYTHON") or sys.executable
_PACKAGE = "import diffusers_quantfix\n"
_DEVICES = "import tests.programs.devices\n"
SECONDS = 240


class Failed(AssertionError):
    """A program ended with an error or not at all; the text is the end of what it wrote."""


@functools.cache
def has(*modules: str) -> bool:
    """Whether the interpreter of the programs has these modules."""
    code = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    return (
        subprocess.run([PYTHON, "-c", code, *modules], check=False, stderr=subprocess.DEVNULL).returncode == 0
    )


def need(*modules: str) -> None:
    """Skip the test where one of these is not installed."""
    missing = [module for module in modules if not has(module)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `python -m tests.programs` runs this where it is")


def run(
    program: str,
    folder: Path,
    *arguments: str | Path,
    package: bool = True,
    launcher: tuple[str, ...] = (),
    **variables: str,
) -> dict[str, Any]:
    """What a program tells.

    Code of others hangs now and then.  A program that exceeds its time is started once more, with a warning, if this
    package has no part in it: if it ran without the package, or also hangs without it.

    Args:
        program: the name of a file of this folder, without its ending.
        folder: where its copy is written and where it runs.
        arguments: of the program.
        package: whether it imports the package: in its first line, or, in a program that says ``# imports the package
            itself``, where "PACKAGE" is its last argument.
        launcher: what stands before the program: ("-m", "accelerate.commands.launch"), or an executable's name.
        variables: of its environment.

    Raises:
        Failed: it ended with an error, or not in time.
    """

    def once(package: bool) -> dict[str, Any]:
        return _once(program, folder, arguments, package, launcher, variables)

    try:
        return once(package)
    except Hung as first:
        if package and not _hangs(lambda: once(False)):
            raise Failed(str(first)) from None
        warnings.warn(
            f"{program} hangs without the package, so it is started once more: {first}", stacklevel=2
        )
    try:
        return once(package)
    except Hung as second:
        raise Failed(f"twice {second}") from None


def _hangs(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except Hung:
        return True
    except Failed:
        return False
    return False


def _once(
    program: str,
    folder: Path,
    arguments: tuple[str | Path, ...],
    package: bool,
    launcher: tuple[str, ...],
    variables: dict[str, str],
) -> dict[str, Any]:
    """Run it one time; raises `Failed`, or `Hung` where it is not over in time."""
    text = (HERE / f"{program}.py").read_text(encoding="utf-8")
    itself = "\n# imports the package itself\n" in text
    head = (_PACKAGE if package and not itself else "") + (_DEVICES if "\n# needs: devices\n" in text else "")
    side = folder / ("with" if package else "without")
    side.mkdir(parents=True, exist_ok=True)
    copy = side / f"{program}.py"
    copy.write_text(head + text, encoding="utf-8")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "DIFFUSERS_")) or name == rig.LATE
    }
    if package and sys.executable == PYTHON and not unmet("diffusers>=0.42"):
        kept[rig.LATE] = "1"
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    kept["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{kept.get('PATH', '')}"
    start = [*launcher] if launcher and not launcher[0].startswith("-") else [PYTHON, *launcher]
    command = [*start, *([PYTHON] if start[0] != PYTHON else []), str(copy), *map(str, arguments)]
    done = processes.run(command + ["PACKAGE"] * (package and itself), SECONDS, side, kept)
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not told:
        raise Failed(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(told[-1].removeprefix("RESULT "))
