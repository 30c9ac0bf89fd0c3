"""Run by `test_newest` in a copy of the project: ``--add NAME=RELEASE --write`` with results that are pretended.

    python -m tests.upstream.pretended NAME RELEASE FIXED SHY

Everything is real but the environment and the tests in it.  Every defect is still there in the new release, except
those of FIXED (ids with commas).  The tests of SHY cannot run once its claim was extended.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.upstream import newest
from tests.upstream.cells import Cell, fits, read
from tests.upstream.run_cell import blank, declarations
from tests.upstream.verdict import Run, judge

NAME, RELEASE, FIXED, SHY = sys.argv[1:]
TABLE = read()
AT_FIRST = {fix_id: said["claims"] for fix_id, said in declarations().items()}
NEWEST = TABLE.releases[NAME][-1]


def is_there(fix_id: str, pins: dict[str, str]) -> bool:
    """Whether the defect is in these releases: as it was in the newest release so far, but for those of FIXED."""
    before = {**pins, **({NAME: NEWEST} if pins.get(NAME) == RELEASE else {})}
    return fits(AT_FIRST[fix_id], before) and not (before != pins and fix_id in FIXED.split(","))


def pretend(
    cell: Cell,
    folder: Path,
    phase: Any,
    assess: Any = judge,
    try_candidates: bool = False,
    quick: bool = False,
) -> dict[str, Any]:
    bare, patched, found = Run(), Run(), {}
    for fix_id, said in declarations().items():
        fitting, there = fits(said["claims"], cell.pins), is_there(fix_id, cell.pins)
        installed = all(name in cell.pins for name in said["claims"])
        claim = "fits" if fitting else "out-of-range" if installed else "missing"
        found[fix_id] = {
            "claims": said["claims"], "claim": claim, "why": "pretended", "detail": "", "slots": [],
            "probe": ("broken" if there else "healthy") if installed else "",
            "patch": "ok" if there and (fitting or try_candidates) else "",
        }  # fmt: skip
        gate = "broken: x" if fitting and there else f"{'healthy' if fitting else claim}: x"
        skipped = fix_id == SHY and fitting
        for run, good in ((bare, not there or fitting), (patched, not there or fitting)):
            run.tests[f"tests/fixes/test_{fix_id}.py::test"] = {
                "outcome": "skipped" if skipped or not installed else "passed" if good else "failed",
                "reason": "needs what is not here", "fixes": [fix_id], "gates": {fix_id: gate},
            }  # fmt: skip
        patched.board[fix_id] = {"state": "applied" if fitting and there else claim, "reason": "pretended"}
        if there and not fitting and installed:  # every other one has the same code
            same = sum(map(ord, fix_id)) % 2 == 0
            patched.board[fix_id] |= {
                "state": "applied" if same else "candidate",
                "same_code": same,
                "above": not same,
            }
    verdict = assess(sorted(found), bare, patched, found)
    return blank(cell, folder) | {
        "fixes": verdict.fixes, "failures": verdict.failures, "skips": verdict.skips, "counts": verdict.counts,
        "installed": cell.pins,
    }  # fmt: skip


def source_of(release: str, folder: Path) -> Path:
    """An empty folder: of the new release there are no sources."""
    home = folder / release
    home.mkdir(exist_ok=True)
    return home


if __name__ == "__main__":
    last = newest._last(TABLE)
    newest.resolve = lambda cell, log: {**last.pins, NAME: RELEASE}
    newest.run_cell = pretend
    newest.record = lambda cell, folder: {}
    newest.sources = lambda library, release, folder: source_of(release, folder)
    sys.exit(newest.run([f"{NAME}={RELEASE}"], TABLE, Path(mkdtemp()), write=True))
