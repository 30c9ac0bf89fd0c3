"""The command line of the benchmarks; see `tests.benchmarks`."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

# They declare the figures.
from . import calls, commands, compiling, loading, memory, offloading, releasing, start, steps, tools  # noqa: F401
from .compare import as_dicts, compared, merged, read
from .figure import FIGURES, Row
from .measure import CannotMeasure

LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "bitsandbytes", "wrapt")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table; 1 when a goal is missed or, compared with earlier results, something grew."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description="What the package costs and saves."
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"all, or some of {', '.join(FIGURES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, too")
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="TIMES",
        help="measure so many times; tells the noise of each row",
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="show the results beside those in FILE")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="with --compare: read them, measure nothing"
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.figures if name not in FIGURES]:
        parser.error(f"no figure is called {unknown[0]!r}; there are {', '.join(FIGURES)}")
    if options.repeat < 1:
        parser.error("--repeat takes a number from 1 on")
    if options.results and not options.compare:
        parser.error("--results needs --compare")
    try:
        old = read(options.compare) if options.compare else None
        rows = read(options.results) if options.results else None
    except ValueError as error:
        parser.error(str(error))
    if rows is None:
        machine = _machine()
        print(machine["text"])
        rows = merged([_measured(options.figures or list(FIGURES)) for _ in range(options.repeat)])
        if options.json:
            text = json.dumps({**machine, "rows": as_dicts(rows)}, indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
    missed = [row for row in rows if row.verdict == "no"]
    fails = bool(missed)
    if old is not None:
        if options.figures:
            measured = {row.what for row in rows}
            old = [row for row in old if row.what in measured]
        print(f"\n{'':<76} {'before':>12} {'now':>12}")
        for line, failed in compared(old, rows):
            print(line)
            fails = fails or failed
    print(f"{sum(row.verdict == 'yes' for row in rows)} goals met, {len(missed)} missed")
    return int(fails)


def _measured(names: list[str]) -> list[Row]:
    rows: list[Row] = []
    for number, name in enumerate(names, 1):
        began = time.monotonic()
        _say(f"[{number}/{len(names)}] {name} ...")
        try:
            for row in FIGURES[name]():
                rows.append(row)
                _say("")
                print(_line(row), flush=True)
        except CannotMeasure as error:
            rows.append(Row(name, None, detail=f"not measured: {error}"))
            _say("")
            print(_line(rows[-1]), flush=True)
        _say(f"[{number}/{len(names)}] {name}: {time.monotonic() - began:.0f} s\n")
    return rows


def _line(row: Row) -> str:
    value = "-" if row.value is None else f"{row.value:.3g} {row.unit}".strip()
    goal = "" if row.goal is None else f"{'' if row.exact else '<= '}{row.goal:g}"
    return f"{row.what:<76} {value:>12}  {goal:>8} {row.verdict:<4} {row.detail}"


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


sys.exit(main())
