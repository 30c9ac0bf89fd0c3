"""Interleaved processes, their processor time, and children that answer in JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Command = tuple[Sequence[str], Mapping[str, str]]


class CannotMeasure(Exception):
    """This machine cannot show the figure; the text says why."""


def environment(**more: str) -> dict[str, str]:
    """The variables of a child: ours without what would change the package, and quiet, offline libraries."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DIFFUSERS_QUANTFIX", "PYTHON"))
    }
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return kept | quiet | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"} | more


def processor_seconds(command: Sequence[str], variables: Mapping[str, str], folder: str) -> float:
    """User and system time of one process and its children.

    Raises:
        CannotMeasure: it failed.
    """
    process = subprocess.Popen(
        list(command), env=dict(variables), cwd=folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise CannotMeasure(f"{' '.join(map(str, command))[:80]} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def interleaved(commands: Mapping[str, Command], runs: int, folder: str = "/") -> dict[str, list[float]]:
    """Processor seconds of each command, run in turn ``runs`` times after one round that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        # every other round backwards, so that no command always comes after the same one
        for name in list(commands)[:: 1 if turn % 2 else -1]:
            seconds = processor_seconds(*commands[name], folder)
            if turn:
                found[name].append(seconds)
    return found


def ratio(
    found: Mapping[str, list[float]],
    name: str,
    base: str,
    of: Callable[[list[float]], float] = statistics.median,
) -> tuple[float, str]:
    """The ratio of two medians (or of what ``of`` makes of the runs), and the two in words."""
    one, other = of(found[name]), of(found[base])
    return one / other, f"{1000 * one:.1f} ms / {1000 * other:.1f} ms, {len(found[name])} runs"


def child(function: str, *arguments: Any, package: bool = True, **variables: str) -> Any:
    """Call ``module:name`` of this folder with arguments in a new process, and return its answer.

    Args:
        function: "calls:forward" for ``tests.benchmarks.calls.forward``.
        package: with the package or without it.

    Raises:
        CannotMeasure: the child says so, or ends badly.
    """
    switch = {} if package else {"DIFFUSERS_QUANTFIX": "off"}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        answer = Path(folder) / "answer.json"
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.child", function, json.dumps(arguments), str(answer), folder],
            env=environment(**switch, **variables), cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not answer.exists():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise CannotMeasure(f"{function} ended with {done.returncode}: {last}")
        said = json.loads(answer.read_text(encoding="utf-8"))
    if "cannot" in said:
        raise CannotMeasure(said["cannot"])
    return said["answer"]
