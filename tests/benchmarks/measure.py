"""Interleaved processes, their processor time, and children that answer in JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .figure import Row

ROOT = Path(__file__).resolve().parents[2]
Command = tuple[Sequence[str], Mapping[str, str]]


class CannotMeasure(Exception):
    """This machine cannot show the figure; the text says why."""


class Failed(CannotMeasure):
    """A process that measures ended badly: it shows nothing, and with the package it should have."""


def not_measured(what: str, error: CannotMeasure, goal: float | None = None) -> Row:
    """The row of what was not measured, and whether it should have been."""
    return Row(what, None, goal=goal, detail=f"not measured: {error}"[:200], failed=isinstance(error, Failed))


class OutOfTime(Exception):
    """A figure takes longer than it may."""


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
        Failed: it ended badly.
    """
    process = subprocess.Popen(
        list(command), env=dict(variables), cwd=folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _, status, used = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Failed(f"{' '.join(map(str, command))[:80]} ended with {process.returncode}")
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
        CannotMeasure: the child says so.
        Failed: the child ends badly.
    """
    (said,) = children([(function, *arguments)], package=package, **variables)
    if isinstance(said, Exception):
        raise said
    return said


def children(
    calls: Sequence[tuple[Any, ...]], *, package: bool = True, **variables: str
) -> list[Any | CannotMeasure]:
    """What `child` answers, or the exception that it would raise, for each of several calls in one process.

    A new process takes seconds to import the libraries: counts, which do not depend on what ran before, share one.
    After a call that ends the process a new one does the rest.
    """
    switch = {} if package else {"DIFFUSERS_QUANTFIX": "off"}
    said: list[Any | CannotMeasure] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        answers = Path(folder) / "answers"
        while len(said) < len(calls):
            answers.write_text("", encoding="utf-8")
            done = subprocess.run(
                [sys.executable, "-m", "tests.benchmarks.child", json.dumps(calls[len(said):]), str(answers)],
                env=environment(**switch, **variables), cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            for line in answers.read_text(encoding="utf-8").splitlines():
                (kind, answer), *_ = json.loads(line).items()
                said.append(answer if kind == "answer" else KINDS[kind](answer))
            if len(said) < len(calls):
                last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
                said.append(Failed(f"{calls[len(said)][0]} ended with {done.returncode}: {last}"))
    return said


KINDS = {"cannot": CannotMeasure, "failed": Failed}


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds; what it started with `subprocess.run` is ended."""

    def ring(number: int, frame: object) -> None:
        raise OutOfTime(f"out of time: more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    # Again after a minute, where the first was raised in code that ignores exceptions, such as a destructor.
    signal.setitimer(signal.ITIMER_REAL, seconds, 60)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
