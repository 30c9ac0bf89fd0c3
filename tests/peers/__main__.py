"""Runs the tests of accelerate and PEFT without the package and with it, and compares them; see the package."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import FrameType

import psutil

from tests.upstream.cells import Cell, digest, read
from tests.upstream.environments import CannotInstall, cache_folder, locked, prepare

from . import results
from .compare import Comparison, Run, compare, intended
from .sources import LIBRARIES, Library, tests_of

ROOT = Path(__file__).parents[2]
SETS = ("D14", "D10", "D04")
PLACES = ("cpu", "rig")
# What the tests import beside their library.
_BESIDE = {"attrs": "", "datasets": "", "parameterized": "", "psutil": "", "scipy": ""}
_PROCESS_SECONDS = 3600
_PROCESS_BYTES = 8 << 30
_DEATHS = 5
_stopping = threading.Event()


class Job:
    """The tests of one library, on one release set and in one place.

    Args:
        cell: the release set.
        library: whose tests.
        place: "cpu" or "rig".
        quick: the part that CI runs.
    """

    def __init__(self, cell: Cell, library: Library, place: str, quick: bool) -> None:
        files = library.quick if quick else library.files
        self._leave = library.leave
        self._select = {
            file: pattern for file, pattern in files.items() if place == "rig" or file not in library.rig_only
        }
        self._place = place
        self.title = f"{library.name} {cell.pins[library.name]} on {cell.name}, {place}"
        folder = cache_folder()
        self._logs = folder / "logs" / "peers" / f"{cell.name}-{library.name}-{place}"
        self._logs.mkdir(parents=True, exist_ok=True)
        cell = replace(cell, pins={**cell.pins, **_BESIDE})
        environment = prepare(cell, folder, self._logs / "install.log")
        self._python = environment.python
        self._tests = tests_of(library.name, cell.pins[library.name], folder)
        self._home = _hub_of(cell, self._python, folder)

    def run(self) -> tuple[Comparison, list[str]]:
        """Both sides, the tests that differ a second time; and the names of those that then agreed."""
        with ThreadPoolExecutor(2) as pool:
            without, ours = pool.map(self._side, (False, True))
        for run, side in ((without, "without"), (ours, "with")):
            if not run.whole:
                raise RuntimeError(f"{self.title}, {side} the package: no end; see {self._logs}")
        if "applied" not in ours.board.values():
            raise RuntimeError(f"{self.title}: no fix was applied, nothing is compared")
        allowed = intended()
        found = compare(without, ours, allowed)
        again = [test for test in found.different if "::" in test]
        if not again:
            return found, []
        only = self._logs / "again.txt"
        only.write_text("\n".join(again), encoding="utf-8")
        second = compare(self._side(False, only), self._side(True, only), allowed)
        steady = [test for test in again if test in second.different]
        unsteady = [test for test in again if test not in second.different]
        found.different = {
            test: said for test, said in found.different.items() if test in steady or "::" not in test
        }
        return found, unsteady

    def _side(self, package: bool, only: Path | None = None) -> Run:
        """All tests in one process; in one more for each that ended it."""
        side = f"{'with' if package else 'without'}{'-again' if only else ''}"
        leave = self._logs / f"{side}-leave.txt"
        run = Run()
        for number in range(_DEATHS):
            leave.write_text("\n".join(run.tests), encoding="utf-8")
            report = self._logs / f"{side}-{number}.jsonl"
            report.write_text("")
            self._process(
                side, package, report, ["--peers-leave", str(leave), "--peers-only", str(only or "")]
            )
            before = len(run.tests)
            run.read(report)
            if run.whole or len(run.tests) == before:
                break
        return run

    def _process(self, side: str, package: bool, report: Path, more: list[str]) -> None:
        scratch = self._logs / f"{side}-scratch"
        scratch.mkdir(exist_ok=True)
        command = [
            str(self._python), "-m", "pytest", *(str(self._tests / file) for file in self._select), "-q",
            "-c", os.devnull, "--rootdir", str(self._tests.parent), "-p", "tests.peers.plugin",
            "-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=line", "--peers-report", str(report),
            "--peers-select", json.dumps(self._select), "--peers-never", self._leave, *more,
            *(["--peers-package"] if package else []), *(["--peers-rig"] if self._place == "rig" else []),
        ]  # fmt: skip
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "DIFFUSERS_"))
        }
        kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(self._home),
                 "RUN_SLOW": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}  # fmt: skip
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        if _stopping.is_set():
            return
        with (self._logs / f"{side}.log").open("a", encoding="utf-8") as log:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=scratch, env=kept, check=False,
                timeout=_PROCESS_SECONDS, preexec_fn=_limit_memory,
            )  # fmt: skip


def _limit_memory() -> None:
    """A test that takes all memory is to fail, and not to end somebody else's process."""
    resource.setrlimit(resource.RLIMIT_DATA, (_PROCESS_BYTES, _PROCESS_BYTES))


def end_with_children() -> None:
    """From now on Ctrl-C and SIGTERM end all processes that descend from this one, and then this one."""

    def end(number: int, frame: FrameType | None) -> None:
        _stopping.set()
        while children := psutil.Process().children(recursive=True):
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=1)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _hub_of(cell: Cell, python: Path, folder: Path) -> Path:
    """The folder with the stand-ins for the Hub's models, made once for each environment and each text of `hub`."""
    text = (ROOT / "tests/peers/hub.py").read_text(encoding="utf-8")
    home = folder / "peers" / f"hub-{digest([cell.key, text])}"
    with locked(home.with_suffix(".lock")):
        if not (home / "complete").exists():
            home.mkdir(parents=True, exist_ok=True)
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            with (home / "log").open("w", encoding="utf-8") as log:
                subprocess.run(
                    [str(python), "-m", "tests.peers.hub", str(home)],
                    env=environment, check=True, stdout=log, stderr=log,
                )  # fmt: skip
            (home / "complete").touch()
    return home


def report(title: str, found: Comparison, unsteady: list[str], seconds: float) -> None:
    """One paragraph on standard output."""
    counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(found.same.items(), reverse=True))
    print(f"{title} ({seconds:.0f} s)\n  same on both sides: {counts or 'nothing'}")
    for reason in dict.fromkeys(found.meant.values()):
        print(f"  intended, {list(found.meant.values()).count(reason)} tests: {reason}")
    for test in unsteady:
        print(f"  differed once, agreed when repeated: {test}")
    for test, said in found.different.items():
        print(f"  DIFFERENT {test}\n    {said}")


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 if nothing differs, 1 if something does, 2 if something could not be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--library", choices=tuple(LIBRARIES), help="of one library only")
    parser.add_argument(
        "--set", action="append", help=f"a release set of cells.toml; default {' '.join(SETS)}"
    )
    parser.add_argument("--place", choices=PLACES, help="on the plain CPU or on the fake CUDA devices only")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="what CI runs: a part, on the newest set")
    kind.add_argument("--write", action="store_true", help="write the counts to tests/peers/results.json")
    asked = parser.parse_args(arguments)
    try:
        cells = read().select(asked.set or [SETS[0]] if asked.quick else asked.set or list(SETS))
    except ValueError as error:
        parser.error(str(error))
    status = 0
    for cell in cells:
        for library in [LIBRARIES[asked.library]] if asked.library else LIBRARIES.values():
            for place in [asked.place] if asked.place else PLACES:
                began = time.monotonic()
                try:
                    job = Job(cell, library, place, asked.quick)
                    found, unsteady = job.run()
                except (CannotInstall, RuntimeError, subprocess.SubprocessError) as error:
                    print(f"NOT RUN {cell.name} {library.name} {place}: {error}", flush=True)
                    status = 2
                    continue
                report(job.title, found, unsteady, time.monotonic() - began)
                sys.stdout.flush()
                if asked.write:
                    row = results.row(cell.pins[library.name], date.today().isoformat(), found, unsteady)
                    results.save(results.load() | {f"{cell.name} {library.name} {place}": row})
                status = max(status, 1 if found.different else 0)
    return status


if __name__ == "__main__":
    end_with_children()
    raise SystemExit(main())
