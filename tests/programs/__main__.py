"""Runs the tests of the programs with an interpreter that has all that they ask for; see the package."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.upstream.cells import read
from tests.upstream.environments import CannotInstall, cache_folder, find_uv, locked, prepare

ROOT = Path(__file__).parents[2]
SET = "D14"
# What the programs import beside a release set: the newest release that the others allow.
_BESIDE = ("nbclient", "ipykernel", "gevent", "ddtrace", "opentelemetry-distro")
# What unsloth asks for otherwise: the wheels of the registry need CUDA, and the set has its own transformers.
_OVERRIDES = "torchvision; python_version < '3'\nxformers; python_version < '3'\ntransformers\n"


def interpreter() -> Path:
    """Of the environment of the programs, from the cache or freshly built.

    Raises:
        CannotInstall: with the requirement that failed.
    """
    (cell,) = read().select([SET])
    cell = replace(cell, pins={**cell.pins, **dict.fromkeys(_BESIDE, "")})
    logs = cache_folder() / "logs" / "programs"
    logs.mkdir(parents=True, exist_ok=True)
    python = prepare(cell, cache_folder(), logs / "install.log").python
    overrides = python.parents[1] / "unsloth.txt"
    with locked(overrides.with_suffix(".lock")):
        if not overrides.exists():
            requested = logs / "overrides.txt"
            requested.write_text(_OVERRIDES)
            command = [
                *find_uv(),
                "pip",
                "install",
                "-q",
                "-p",
                str(python),
                "--override",
                str(requested),
                "unsloth",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotInstall(f"cannot install unsloth: {done.stderr.strip()}")
            requested.replace(overrides)
    return python


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments; its exit code, or 2 where the environment cannot be had."""
    try:
        python = interpreter()
    except CannotInstall as error:
        print(f"tests.programs: {error}", file=sys.stderr)
        return 2
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "long or thorough", "tests/programs", *arguments],
        cwd=ROOT, env={**os.environ, "DIFFUSERS_QUANTFIX_PROGRAMS_PYTHON": str(python)}, check=False,
    ).returncode  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
