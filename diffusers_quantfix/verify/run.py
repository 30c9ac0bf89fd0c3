"""Runs the cases in two processes at the same time, without the package and with it, and compares the results."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time

from ..activation import target_names
from ..engine.settings import VARIABLE
from ..user_settings import settings
from . import rig as rig_of_clone
from .report import (
    CANNOT_REPRODUCE,
    NOT_NEEDED,
    NOT_PATCHED,
    NOT_REPRODUCED,
    PATCHED,
    TIMED_OUT,
    Line,
    Report,
    heading,
)
from .side import PROGRAM, Side

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any


def verify(ids: Iterable[str] = (), rig: bool = False, show: Callable[[str], object] | None = None) -> Report:
    """Reproduce every bug that applies here, without the package and with it.

    Args:
        ids: ids of fixes or names of their targets; all if empty.
        rig: run the cases that need a CUDA device on the rig's fake devices, in a clone of the repository.
        show: called with each part of the printed report as soon as it is known.

    Returns:
        The report; it prints as a table, and ``to_dict()`` returns JSON data.

    Raises:
        ValueError: an id names no fix.
        RuntimeError: the package is switched off, or the process that imports the libraries died.
    """
    ids = tuple(ids)
    wanted = target_names(ids)
    if settings().off:
        raise RuntimeError(f"the package is switched off by {VARIABLE}: unset it, and verify again")
    start = time.monotonic()
    has_rig = rig and rig_of_clone.is_here()
    program = rig_of_clone.command() if has_rig else PROGRAM
    lines: dict[str, Line] = {}
    with tempfile.TemporaryDirectory(prefix="quantfix-verify-") as work, _progress(show) as progress:
        sides: list[Side] = []
        try:
            for setting, name in (("off", "without"), (None, "with")):
                sides.append(Side(setting, os.path.join(work, name), progress.step, ids, program))
            before, after = sides
            _pump([after], progress)  # both import the libraries meanwhile; only this one has a board
            board = after.board or {}
            progress.show(heading(board["installed"]))
            answers = {
                answer["id"]: {**answer, "title": fix["title"]}
                for fix in board["fixes"]
                for answer in fix["targets"]
                if answer["id"] in wanted
            }
            applied = [fix_id for fix_id, answer in answers.items() if answer["state"].startswith("applied")]

            def settle() -> None:
                """Report every fix whose verdict is known by now."""
                for fix_id, answer in answers.items():
                    runs = fix_id in applied
                    if fix_id not in lines and not (runs and any(side.owes(fix_id) for side in sides)):
                        lines[fix_id] = _line(answer, before.found.get(fix_id), after.found.get(fix_id))
                        progress.show(str(lines[fix_id]))

            if applied:
                progress.expect(2 * len(applied))
                for side in sides:
                    side.give(applied)
                _pump(sides, progress, settle)
            settle()
        finally:
            for side in sides:
                side.end()
    missing = sum(bool(before.found.get(fix_id, {}).get("needs_device")) for fix_id in answers)
    without = "" if has_rig or not rig else rig_of_clone.ELSEWHERE
    note = rig_of_clone.advice(missing, rig, without or before.without or after.without)
    report = Report([lines[fix_id] for fix_id in answers], board["installed"], time.monotonic() - start, note)
    if show is not None:
        show(report.summary())
    return report


def _pump(sides: list[Side], progress: _Progress, settle: Callable[[], None] | None = None) -> None:
    while any(side.busy for side in sides):
        time.sleep(0.05)
        for side in sides:
            side.pump()
        if settle is not None:
            settle()
        progress.redraw(" | ".join(side.current for side in sides if side.current))


def _line(answer: dict[str, Any], before: dict[str, Any] | None, after: dict[str, Any] | None) -> Line:
    def line(verdict: str, before: str = "", after: str = "", reason: str = answer["reason"]) -> Line:
        return Line(answer["id"], answer["title"], verdict, before, after, reason, on_rig)

    on_rig = bool(after and after.get("on_rig"))
    if before is None or after is None:
        open_ = answer["above"] or answer["state"] in ("failed", "overwritten", "waiting")
        verdict = NOT_PATCHED if open_ else NOT_NEEDED
        return line(verdict, reason=f"{answer['state']}: {answer['reason']}")
    for event, said in (("cannot reproduce", CANNOT_REPRODUCE), ("timed out", TIMED_OUT)):
        for side, name in ((before, "without the package"), (after, "with it")):
            if side["event"] == event:
                where = f" {name}" if said == TIMED_OUT else ""
                return line(said, reason=side["text"] + where)
    if before.get("unable") and after.get("unable"):
        return line(CANNOT_REPRODUCE, reason=after["text"])
    verdict = PATCHED if after["event"] == "right" else NOT_PATCHED
    if before["event"] == "right":
        verdict = NOT_REPRODUCED if after["event"] == "right" else NOT_PATCHED
    return line(verdict, before["text"], after["text"])


class _Progress:
    """A progress bar on standard error that gives way to the report; none without a terminal or tqdm."""

    def __init__(self, bar: Any, show: Callable[[str], object] | None) -> None:
        self._bar = bar
        self._show = show
        self._drawn = 0.0

    def show(self, text: str) -> None:
        """Print a part of the report."""
        if self._show is None:
            return
        with self._bar.external_write_mode() if self._bar is not None else contextlib.nullcontext():
            self._show(text)

    def expect(self, total: int) -> None:
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_description("verify", refresh=False)
            self._bar.refresh()

    def step(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def redraw(self, current: str) -> None:
        """Redraw even without progress: a moving clock shows that it is running."""
        if self._bar is not None and time.monotonic() - self._drawn > 0.3:
            self._drawn = time.monotonic()
            self._bar.set_postfix_str(current)


@contextlib.contextmanager
def _progress(show: Callable[[str], object] | None) -> Iterator[_Progress]:
    try:
        from tqdm import tqdm
    except ImportError:  # not a requirement of this package, but of libraries that it patches
        yield _Progress(None, show)
        return
    # `disable=None`: only on a terminal
    with tqdm(
        desc="importing the libraries", unit="case", disable=None, leave=False, dynamic_ncols=True
    ) as bar:
        yield _Progress(None if bar.disable else bar, show)
