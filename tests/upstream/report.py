"""What the driver prints: progress while it runs, and the summary, 80 columns wide."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import Any, TextIO

from diffusers_quantfix.text import WIDTH, wrapped

from .verdict import APPLIED, FAILED, HEALTHY, NOT_APPLICABLE, PATCHED


class Progress:
    """One line that is overwritten on a terminal; elsewhere one line per finished cell."""

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._total, self._done, self._bad = total, 0, 0
        self._running: dict[str, str] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def phase(self, cell: str, name: str) -> None:
        """A cell begins a phase."""
        with self._lock:
            self._running[cell] = name
            self._draw()

    def finished(self, result: dict[str, Any], reused: bool) -> None:
        """A cell is done."""
        with self._lock:
            self._running.pop(result["cell"], None)
            self._done += 1
            self._bad += bool(result["failures"])
            said = "reused" if reused else f"{result['seconds'].get('all', 0):.0f} s"
            failures = len(result["failures"])
            state = f"{failures} failure{'s' * (failures > 1)}" if failures else "ok"
            self._clear()
            number = f"{self._done:>{len(str(self._total))}}/{self._total}"
            print(f"[{number}] {result['cell']:<20} {state} ({said})", file=self._out, flush=True)
            self._draw()

    def close(self) -> None:
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._live:
            self._out.write("\r\x1b[K")

    def _draw(self) -> None:
        if not self._live:
            return
        width = 24
        filled = width * self._done // max(self._total, 1)
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        running = ", ".join(f"{cell} {phase}" for cell, phase in self._running.items())
        line = f"[{'#' * filled}{'.' * (width - filled)}] {self._done}/{self._total} {minutes}:{seconds:02} {running}"
        self._clear()
        self._out.write(line[: WIDTH - 1])
        self._out.flush()


def summary(results: list[dict[str, Any]], faults: list[str] | None = None) -> str:
    """A row per cell, the failures, the reasons of all skips with their counts, and the totals.

    Args:
        results: of the cells.
        faults: what is wrong with no single cell.
    """
    lines = ["", f"{'cell':<20} {'patched':>6} {'applied':>7} {'healthy':>7} {'n/a':>4} {'failed':>6}"
                 f" {'tests':>6} {'skips':>6} {'time':>7}", "-" * (WIDTH - 1)]  # fmt: skip
    for result in results:
        states = Counter(said["state"] for said in result["fixes"].values())
        counts = result["counts"]
        lines.append(
            f"{result['cell']:<20} {states[PATCHED]:>6} {states[APPLIED]:>7} {states[HEALTHY]:>7}"
            f" {states[NOT_APPLICABLE]:>4} {states[FAILED]:>6}"
            f" {counts.get('passed', 0) + counts.get('failed', 0):>6} {counts.get('skipped', 0):>6}"
            f" {result['seconds'].get('all', 0):>5.0f} s{'' if not result['failures'] else ' !'}"
        )
    reasons = Counter(skip["reason"] for result in results for skip in result["skips"])
    if reasons:
        lines += ["", f"{sum(reasons.values())} tests could not run, for {len(reasons)} reasons:"]
        for reason, count in reasons.most_common():
            lines += wrapped(f"{count:>5} x {reason}", "", " " * 8)
    for result in results:
        if result["failures"]:
            lines += ["", f"{result['cell']}  (logs in {result['logs']})"]
            for failure in result["failures"]:
                lines += wrapped(f"  - {failure}", "", "    ")
    if faults:
        lines += ["", "over all cells"]
        for fault in faults:
            lines += wrapped(f"  - {fault}", "", "    ")
    unseen = never_shown(results)
    if unseen:
        lines += ["", "applied, but no test of this run could reproduce the defect:"]
        for fix_id, why in unseen.items():
            lines += wrapped(f"  - {fix_id}: {why}", "", "    ")
    total = Counter()
    for result in results:
        total.update(result["counts"])
    bad = [result["cell"] for result in results if result["failures"]]
    lines += ["", f"{len(results) - len(bad)} of {len(results)} cells good"
                  + (f"; not good: {', '.join(bad)}" if bad else "")]  # fmt: skip
    # The plain closing line that a reader of logs can count on; a cell that never got to its tests is a failure.
    failed = max(total["failed"], sum(bool(result["failures"]) for result in results)) + len(faults or ())
    lines.append(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return "\n".join(lines)


def never_shown(results: list[dict[str, Any]]) -> dict[str, str]:
    """Fixes that are applied on some cell and reproduced on none, with the reason."""
    states: dict[str, dict[str, str]] = {}
    for result in results:
        for fix_id, said in result["fixes"].items():
            states.setdefault(fix_id, {}).setdefault(said["state"], said["why"])
    return {fix_id: seen[APPLIED] for fix_id, seen in sorted(states.items())
            if APPLIED in seen and PATCHED not in seen}  # fmt: skip
