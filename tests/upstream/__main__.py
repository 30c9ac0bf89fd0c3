"""The command line of the release matrix; see `tests.upstream`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from diffusers_quantfix.fixes import NAMES
from tests.part import HELP, WHOLE, part_of, read_part

from . import newest, results, tables
from .cells import Cell, read
from .edges import loose
from .environments import CACHE_VARIABLE, CannotInstall, cache_folder, find_uv, locked, prepare
from .forecast import forecast
from .report import Progress, summary
from .run_cell import blank, declarations, previous, relevant, run_cell, stop


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 0 when every cell is good."""
    options = _parser().parse_args(arguments)
    table = read()
    fixes = tuple(name for word in options.fixes for name in NAMES.get(word, (word,)))
    try:
        find_uv()
        if unknown := sorted(set(fixes) - set(declarations())):
            raise ValueError(f"no fix is called {', '.join(unknown)}")
        if options.add:
            return newest.run(options.add, table, options.folder, options.write)
        chosen = [cell for cell in table.select(options.cells) if relevant(cell, fixes)]
        cells = list(part_of(chosen, options.part))
    except (ValueError, CannotInstall) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.install:
        return install(cells, options.folder, options.jobs)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        quick = options.cells == ["ci"]
        print(forecast(cells, options.folder, options.jobs, options.fresh, quick, fixes), flush=True)
        ran = run(cells, options.folder, options.jobs, options.fresh, quick, fixes)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the cells that are not done", file=sys.stderr)
        return 130
    too_wide = []
    if {cell.name for cell in table.cells} <= {cell.name for cell in cells}:
        pairs = list(zip(cells, ran, strict=True))
        for fix_id, said in declarations().items():
            if fixes and fix_id not in fixes:
                continue
            too_wide += [f"{fix_id}: {line}" for line in loose(said["claims"], fix_id, table.known, pairs)]
    if options.write:
        results.save(results.merged(results.load(), ran, declarations(), table))
        tables.write()
    print(summary(ran, too_wide))
    took = f"{time.monotonic() - began:.0f} s with {options.jobs} at a time"
    print(f"{took}; results and logs in {options.folder}")
    return int(bool(too_wide) or any(result["failures"] for result in ran))


def install(cells: list[Cell], folder: Path, jobs: int) -> int:
    """Make the environments of these cells; 1 where one cannot be made, and why."""

    def one(cell: Cell) -> str:
        log = folder / "logs" / cell.name / "install.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            prepare(cell, folder, log)
        except CannotInstall as error:
            return f"{cell.name}: {error}"
        return ""

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        refused = [said for said in pool.map(one, cells) if said]
    print("\n".join([*refused, f"{len(cells) - len(refused)} of {len(cells)} environments are ready"]))
    return int(bool(refused))


def run(
    cells: list[Cell],
    folder: Path,
    jobs: int,
    fresh: bool,
    quick: bool = False,
    fixes: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """The results of these cells, in their order; those of an interrupted run are taken over unless ``fresh``.

    ``quick`` keeps to the tests that prove a defect, ``fixes`` to those of some fixes.
    """
    progress = Progress(len(cells))
    finished: dict[str, dict[str, Any]] = {}

    def one(cell: Cell) -> tuple[dict[str, Any], bool]:
        # A second driver on the same cell waits, and then finds the result of the first.
        with locked(folder / "locks" / f"{cell.name}.lock"):
            found = None if fresh else previous(folder, cell, quick, fixes)
            if found is not None and not found["failures"]:
                return found, True
            try:
                phase = lambda name: progress.phase(cell.name, name)  # noqa: E731
                return run_cell(cell, folder, phase, quick=quick, fixes=fixes), False
            except Exception as error:  # the other cells go on, and this one is not good
                said = f"the driver failed: {type(error).__name__}: {error}"
                return blank(cell, folder) | {"failures": [said]}, False

    pool = ThreadPoolExecutor(max_workers=jobs)
    try:
        # The long ones first: the last set runs alone.  Two more libraries take nearly twice as long.
        waiting = sorted(cells, key=lambda cell: -len({"optimum-quanto", "torchao"} & set(cell.pins)))
        for future in as_completed([pool.submit(one, cell) for cell in waiting]):
            result, reused = future.result()
            finished[result["cell"]] = result
            progress.finished(result, reused)
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        stop()
        raise
    finally:
        progress.close()
        pool.shutdown(cancel_futures=True)
    return [finished[cell.name] for cell in cells]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream",
        description="Runs the tests of all fixes on pinned releases, without us and with us.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--cells", nargs="+", metavar="CELL",
        help="ci (the sets of CI, only the proofs of defects), all (every cell and range), ranges, names",
    )  # fmt: skip
    what.add_argument(
        "--add", nargs="+", metavar="NAME=RELEASE",
        help="try new releases, e.g. diffusers=0.43.0 bitsandbytes=latest; what is not named is the newest",
    )  # fmt: skip
    parser.add_argument(
        "--fixes", nargs="+", default=(), metavar="ID",
        help="with --cells: run only the test files of these fixes or targets",
    )  # fmt: skip
    parser.add_argument("--part", type=read_part, default=WHOLE, metavar="K/M", help=f"with --cells: {HELP}")
    parser.add_argument(
        "--install", action="store_true", help="with --cells: only make the environments, for a later run"
    )
    parser.add_argument(
        "--write", action="store_true",
        help="write what was seen into results.json and the generated pages; with --add also the set, and every claim "
        "that the new releases decide",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="cells at a time (default 2)"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="run again what an earlier run has a good result for"
    )
    parser.add_argument(
        "--folder", type=Path, default=cache_folder(),
        help=f"environments, logs and results (default: ${CACHE_VARIABLE} or the user's cache)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
