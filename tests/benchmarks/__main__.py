"""The command line of the benchmarks; see `tests.benchmarks`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# They declare the figures.
from . import (  # noqa: F401
    calls,
    commands,
    compiling,
    loading,
    memory,
    merging,
    newer,
    offloading,
    releasing,
    start,
    steps,
    tools,
)
from .compare import compared
from .figure import FIGURES, Row
from .measure import CannotMeasure, OutOfTime, not_measured, time_limit
from .results import Measurement, Results, read

LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "bitsandbytes", "wrapt")
LIMIT = 1800


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table; 1 when a goal is missed, a figure fails or, compared, something grew."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # `--compare OLD memory` is one file and a figure, `--compare OLD NEW` two files.
    first, *more = options.compare or [None]
    options.figures += [word for word in more if word in FIGURES]
    others = [Path(word) for word in more if word not in FIGURES]
    if unknown := [name for name in options.figures if name not in FIGURES]:
        parser.error(f"no figure is called {unknown[0]!r}; there are {', '.join(FIGURES)}")
    if len(others) > 1 or (others and (options.figures or options.json)):
        parser.error("--compare takes one file and measures, or takes two files and nothing else")
    if options.repeat < 1 or not 0 < options.limit < math.inf:
        parser.error("--repeat takes a number from 1 on, --limit one above 0")
    if options.again and not options.json:
        parser.error("--again needs --json, the file that it measures again for")
    names = list(dict.fromkeys(options.figures or FIGURES))
    try:
        old = read(Path(first)) if first else None
        if others:
            rows = read(others[0])
        else:
            machine = _machine()
            results = Results(options.json, machine)
            print(machine["text"])
            measure(results, names, options.repeat, options.limit, again=options.again)
            rows = results.rows(names)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        kept = (
            f"; {options.json} has what was measured, the same command measures the rest"
            if options.json
            else ""
        )
        print(f"\ninterrupted{kept}", file=sys.stderr)
        return 130
    missed = [row for row in rows if row.verdict == "no"]
    failed = [row for row in rows if row.failed]
    fails = bool(missed or failed)
    if old is not None:
        if options.figures:
            old = _of(old, names, rows)
        print(f"\n{'':<76} {'before':>12} {'now':>12}")
        for line, bad in compared(old, rows):
            print(line)
            fails = fails or bad
    print(
        f"{sum(row.verdict == 'yes' for row in rows)} goals met, {len(missed)} missed"
        + (f", {len(failed)} failed: {', '.join(row.what.strip() for row in failed)}" if failed else "")
    )
    return int(fails)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description="What the package costs and saves."
    )
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", help=f"which to measure, all by default: {', '.join(FIGURES)}"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the rows to FILE after each figure; what is there already is not measured again",
    )
    parser.add_argument("--again", action="store_true", help="with --json: measure what is in FILE again")
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="TIMES",
        help="measure so many times; tells the noise of each row",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        metavar="SECONDS",
        help="a figure that takes longer fails, the others are measured; default %(default)s",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="show the results beside those in FILE; of two files the second is compared, and nothing measured",
    )
    return parser


def measure(
    results: Results, names: Iterable[str], repeat: int, limit: float, *, again: bool = False
) -> None:
    """Measure each figure ``repeat`` times, where ``results`` does not have it yet, and print its rows.

    Args:
        again: measure what is there again, too; the first new measurement of a figure replaces all of its old ones.

    Raises:
        ValueError: the file cannot be written.
    """
    names = list(names)
    for turn in range(1, repeat + 1):
        for number, name in enumerate(names, 1):
            where = f"[{number}/{len(names)}] {name}"
            if not again and results.has(name, turn):
                print(f"{name}: in {results.path} already")
                continue
            began = time.monotonic()
            _say(f"{where} ...")
            found = tuple(dataclasses.replace(row, figure=name) for row in _measured(name, limit))
            try:
                results.add(Measurement(name, turn, found), alone=again and turn == 1)
            except OSError as error:
                raise ValueError(f"{results.path} cannot be written: {error.strerror}") from error
            _say(f"{where}: {time.monotonic() - began:.0f} s\n")


def _measured(name: str, limit: float) -> list[Row]:
    """The rows of one figure; the last one says so where it failed or took longer than ``limit`` seconds."""
    rows: list[Row] = []

    def keep(row: Row) -> None:
        if row.value is not None and not math.isfinite(row.value):
            row = dataclasses.replace(
                row, value=None, detail=f"failed: {row.value}; {row.detail}", failed=True
            )
        rows.append(row)
        _say("")
        print(_line(row), flush=True)

    try:
        with time_limit(limit), contextlib.closing(FIGURES[name]()) as found:
            for row in found:
                keep(row)
    except CannotMeasure as error:
        keep(not_measured(name, error))
    except OutOfTime as error:
        keep(Row(name, None, detail=str(error), failed=True))
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        keep(Row(name, None, detail=f"failed: {type(error).__name__}: {first}"[:200], failed=True))
    return rows


def _of(old: list[Row], names: list[str], new: list[Row]) -> list[Row]:
    """The rows of these figures; an older file does not name them, there those of the same name are."""
    measured = {row.what for row in new}
    return [row for row in old if (row.figure in names if row.figure else row.what in measured)]


def _line(row: Row) -> str:
    value = "-" if row.value is None else f"{row.value:.3g} {row.unit}".strip()
    goal = "" if row.goal is None else f"{'' if row.exact else '<= '}{row.goal:g}"
    return f"{row.what:<76} {value:>12}  {goal:>8} {'FAILED' if row.failed else row.verdict:<4} {row.detail}"


def _say(text: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _machine() -> dict:
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    device = "no GPU: device figures are of the tests' rig"
    try:
        import torch

        if torch.cuda.is_available():
            device = torch.cuda.get_device_name(0)
    except ImportError:
        pass
    today = datetime.datetime.now(datetime.UTC).date().isoformat() if sys.version_info >= (3, 11) else ""
    text = (
        f"{today}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} "
        f"processors, {device}\n" + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    return {"date": today, "device": device, "versions": versions, "text": text}


if __name__ == "__main__":
    sys.exit(main())
