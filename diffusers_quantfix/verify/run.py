"""Runs the cases in two processes, without the package and with it, and compares what they said."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

from ..activation import known_ids
from ..engine.settings import VARIABLE
from .report import CANNOT_SHOW, MENDED, NOT_MENDED, NOT_NEEDED, NOT_SHOWN, Line, Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

TIME_LIMIT = 300.0  # seconds for one side of all cases: a hang must not look like work
_PACKAGE = __name__.partition(".")[0]


def verify(ids: Iterable[str] = ()) -> Report:
    """Reproduce every defect that applies here, without the package and with it.

    Args:
        ids: ids of fixes; all when empty.

    Returns:
        The report; it prints as a table, ``to_dict()`` is for machines.

    Raises:
        ValueError: an id names no fix.
        RuntimeError: the board could not be read in a process of its own.
    """
    wanted = known_ids(tuple(ids))
    start = time.monotonic()
    board = _board()
    answers = {answer["id"]: answer for answer in board["fixes"] if answer["id"] in wanted}
    applied = [fix_id for fix_id, answer in answers.items() if answer["state"] == "applied"]
    with tempfile.TemporaryDirectory(prefix="quantfix-verify-") as work, _progress(2 * len(applied)) as step:
        before = _side("off", applied, os.path.join(work, "without"), step)
        after = _side("", applied, os.path.join(work, "with"), step)
    lines = [_line(answer, before.get(fix_id), after.get(fix_id)) for fix_id, answer in answers.items()]
    return Report(lines, board["installed"], time.monotonic() - start)


def _line(answer: dict[str, Any], before: dict[str, str] | None, after: dict[str, str] | None) -> Line:
    def line(verdict: str, before: str = "", after: str = "", reason: str = answer["reason"]) -> Line:
        return Line(answer["id"], answer["title"], verdict, before, after, reason)

    if before is None or after is None:
        verdict = NOT_MENDED if answer["state"] in ("failed", "overwritten", "waiting") else NOT_NEEDED
        return line(verdict, reason=f"{answer['state']}: {answer['reason']}")
    if "cannot show" in (before["event"], after["event"]):
        return line(
            CANNOT_SHOW, reason=next(e["text"] for e in (before, after) if e["event"] == "cannot show")
        )
    verdict = MENDED if after["event"] == "right" else NOT_MENDED
    if before["event"] == "right":
        verdict = NOT_SHOWN if after["event"] == "right" else NOT_MENDED
    return line(verdict, before["text"], after["text"])


def _board() -> dict[str, Any]:
    """The board of a fresh process: this one may have been changed by its caller."""
    done = subprocess.run(
        [sys.executable, "-m", _PACKAGE, "status", "--json"], capture_output=True, text=True, check=False
    )
    try:
        board: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"`{_PACKAGE} status` failed in a process of its own: {last[0]}") from None
    return board


def _side(setting: str, ids: list[str], work: str, step: Any) -> dict[str, dict[str, str]]:
    """Run the cases with ``DIFFUSERS_QUANTFIX=setting``: id -> last event of its case."""
    os.makedirs(work)
    results = os.path.join(work, "results.jsonl")
    # One thread: tiny models, and the same order of every sum in both processes.
    environment = {**os.environ, VARIABLE: setting, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found: dict[str, dict[str, str]] = {}
    pending = list(ids)
    deadline = time.monotonic() + TIME_LIMIT
    while pending:
        with open(os.path.join(work, "log"), "ab") as log:
            child = subprocess.Popen(
                _command(results, work, pending), env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            _read(results, found, step)
        if child.poll() is None:
            child.kill()
        code = child.wait()
        _read(results, found, step)
        done = [fix_id for fix_id in pending if found.get(fix_id, {}).get("event", "begin") != "begin"]
        pending = [fix_id for fix_id in pending if fix_id not in done]
        if (
            pending
        ):  # the child died (a segmentation fault, a hang): blame the case it was in, go on with the rest
            why = (
                f"the process ended with exit code {code}"
                if time.monotonic() < deadline
                else "no end in sight"
            )
            found[pending[0]] = {"id": pending[0], "event": "defect", "text": why}
            step(1)
            pending = pending[1:]
            if time.monotonic() >= deadline:
                found.update({i: {"id": i, "event": "cannot show", "text": "no time left"} for i in pending})
                break
    return found


def _command(results: str, work: str, ids: list[str]) -> list[str]:
    return [sys.executable, "-m", f"{_PACKAGE}.verify.child", results, work, *ids]


def _read(results: str, found: dict[str, dict[str, str]], step: Any) -> None:
    """Take over the complete lines of the results file."""
    if not os.path.exists(results):
        return
    with open(results, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break
            event = json.loads(line)
            old = found.get(event["id"], {}).get("event")
            if old in (None, "begin"):
                found[event["id"]] = event
                if event["event"] != "begin":
                    step(1)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A progress bar on standard error, where it is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:  # only the libraries that we mend bring it
        yield lambda count: None
        return
    with tqdm(total=total, desc="verify", unit="case", disable=None, leave=False) as bar:
        yield bar.update
