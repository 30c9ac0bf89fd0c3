"""Runs the cases in two processes at the same time, without the package and with it, and compares their results."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time

from ..activation import known_ids
from .report import (
    CANNOT_REPRODUCE,
    NOT_NEEDED,
    NOT_PATCHED,
    NOT_REPRODUCED,
    PATCHED,
    TIMED_OUT,
    Line,
    Report,
)
from .side import Side

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any


def verify(ids: Iterable[str] = ()) -> Report:
    """Reproduce every defect that applies here, without the package and with it.

    Args:
        ids: ids of fixes; all when empty.

    Returns:
        The report; it prints as a table, ``to_dict()`` is for machines.

    Raises:
        ValueError: an id names no fix.
        RuntimeError: the libraries end the process that imports them.
    """
    ids = tuple(ids)
    wanted = known_ids(ids)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quantfix-verify-") as work, _progress() as progress:
        sides: list[Side] = []
        try:
            for setting, name in (("off", "without"), (None, "with")):
                sides.append(Side(setting, os.path.join(work, name), progress.step, ids))
            before, after = sides
            _pump([after], progress)  # both import meanwhile; only this one has a board
            board = after.board or {}
            answers = {answer["id"]: answer for answer in board["fixes"] if answer["id"] in wanted}
            applied = [fix_id for fix_id, answer in answers.items() if answer["state"].startswith("applied")]
            if applied:
                progress.expect(2 * len(applied))
                for side in sides:
                    side.give(applied)
                _pump(sides, progress)
        finally:
            for side in sides:
                side.end()
    lines = [
        _line(answer, before.found.get(fix_id), after.found.get(fix_id)) for fix_id, answer in answers.items()
    ]
    return Report(lines, board["installed"], time.monotonic() - start)


def _pump(sides: list[Side], progress: _Progress) -> None:
    while any(side.busy for side in sides):
        time.sleep(0.05)
        for side in sides:
            side.pump()
        progress.show(" | ".join(side.current for side in sides if side.current))


def _line(answer: dict[str, Any], before: dict[str, str] | None, after: dict[str, str] | None) -> Line:
    def line(verdict: str, before: str = "", after: str = "", reason: str = answer["reason"]) -> Line:
        return Line(answer["id"], answer["title"], verdict, before, after, reason)

    if before is None or after is None:
        verdict = NOT_PATCHED if answer["state"] in ("failed", "overwritten", "waiting") else NOT_NEEDED
        return line(verdict, reason=f"{answer['state']}: {answer['reason']}")
    for event, said in (("cannot reproduce", CANNOT_REPRODUCE), ("timed out", TIMED_OUT)):
        for side, name in ((before, "without the package"), (after, "with it")):
            if side["event"] == event:
                where = f" {name}" if said == TIMED_OUT else ""
                return line(said, reason=side["text"] + where)
    verdict = PATCHED if after["event"] == "right" else NOT_PATCHED
    if before["event"] == "right":
        verdict = NOT_REPRODUCED if after["event"] == "right" else NOT_PATCHED
    return line(verdict, before["text"], after["text"])


class _Progress:
    """A progress bar on standard error, or nothing where there is no terminal or no tqdm."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._shown = 0.0

    def expect(self, total: int) -> None:
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_description("verify", refresh=False)
            self._bar.refresh()

    def step(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def show(self, current: str) -> None:
        # Redrawn although nothing is done: a moving clock shows that it is running.
        if self._bar is not None and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            self._bar.set_postfix_str(current)


@contextlib.contextmanager
def _progress() -> Iterator[_Progress]:
    try:
        from tqdm import tqdm
    except ImportError:  # only the libraries that we patch bring it
        yield _Progress(None)
        return
    # `disable=None`: only on a terminal, which is also asked for its width
    with tqdm(
        desc="importing the libraries", unit="case", disable=None, leave=False, dynamic_ncols=True
    ) as bar:
        yield _Progress(None if bar.disable else bar)
