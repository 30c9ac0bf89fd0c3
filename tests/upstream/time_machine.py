"""Would a fix have gone on by itself in the next release?  Asked of all releases of the libraries.

    python -m tests.upstream.time_machine --write

For every fix and each two releases of a library, the first of which is affected: pretend that the claim ends at the
first, and decide about the second by its code (`diffusers_quantfix.engine.same_code`).  Then compare with what is known
of the second: whether the claim, which the release sets prove, says that it is affected, and whether a set was red
without the package there and green with it.

Both ways: the second release is a later one, or an earlier one.  The package never patches below a claim, so the way
back proves only that the code tells releases apart at the other end of a claim too, by what was recorded later.

What a fix relies on is recorded in the release sets themselves, by `proved_code`; the code of the releases between
them is read from their sources, which are downloaded.  Both are kept, so that an interrupted run goes on.  A decision
needs the probe too: where the code is the same and the bug is gone, some release set must have seen the probe say
healthy, in that release or in the nearest ones on both sides of it; else the acceptance counts as wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from diffusers_quantfix.engine.code_marks import CALLED
from diffusers_quantfix.fixes.targets import PACKAGES

from . import environments
from .cells import Cell, Table, digest, read
from .environments import CannotInstall, cache_folder, prepare
from .results import load
from .run_cell import ROOT, declarations
from .source_marks import marks
from .verdict import HEALTHY, NOT_APPLICABLE, PATCHED

FILE = Path(__file__).with_name("time_machine.json")
PAGE = Path(__file__).with_name("TIME_MACHINE.md")
_RECORDER = ("tests/upstream/proved_code.py", "diffusers_quantfix/engine/code_marks.py",
             "diffusers_quantfix/engine/fingerprint.py")  # fmt: skip
RIGHT, CHANGED, KEPT_AWAY, WRONG = "accepted", "not accepted", "kept away by the probe", "wrong"
NOTICED = "noticed by the code"  # that the bug is not there: nothing was accepted, and nothing was to be
BELOW = "below the claim"  # the code is the same, and the number keeps the fix away


def recorded(cells: list[Cell], folder: Path, fresh: bool = False) -> dict[str, dict[str, Any]]:
    """What each fix relies on in each release set: set -> report of `proved_code`.

    Args:
        cells: the release sets.
        folder: where reports and environments are kept.
        fresh: record again what was recorded before, by an earlier state of the fixes.
    """
    key = digest([[name, (ROOT / name).read_text(encoding="utf-8")] for name in _RECORDER])
    found = {}
    for cell in cells:
        file = folder / "proved" / f"{cell.key}-{key}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        if fresh or not file.exists():
            log = file.with_suffix(".log")
            log.write_text("")
            try:
                environment = prepare(cell, folder, log)
            except CannotInstall as error:
                print(f"{cell.name}: {error}", flush=True)
                continue
            command = [str(environment.python), "-m", "tests.upstream.proved_code", "--report", str(file)]
            variables = {**os.environ, **environment.variables, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            with log.open("a", encoding="utf-8") as output:
                subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=output, check=False)
            print(f"{cell.name}: {'recorded' if file.exists() else f'failed, see {log}'}", flush=True)
        if file.exists():
            found[cell.name] = json.loads(file.read_text(encoding="utf-8"))
    return found


def sources(table: Table, pieces: set[str], folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The marks in the sources of each release: (library, release) -> marks."""
    found = {}
    for library, releases in table.releases.items():
        package = PACKAGES.get(library, library)
        wanted = sorted(piece for piece in pieces if piece.startswith((f"{package}.", f"{package}:")))
        for release in releases:
            file = folder / "sources" / library / f"{release}-{digest(wanted)}.json"
            if not file.exists():
                file.write_text(
                    json.dumps(marks(environments.sources(library, release, folder), wanted)),
                    encoding="utf-8",
                )
                print(f"{library} {release}: read", flush=True)
            found[library, release] = json.loads(file.read_text(encoding="utf-8"))
    return found


def steps(
    table: Table, reports: dict[str, dict[str, Any]], read_marks: dict[tuple[str, str], dict[str, str]]
) -> list[dict[str, Any]]:
    """A row for each fix and each two releases of which the first has the bug, in both directions.

    Returns:
        ``fix``, ``library``, ``before`` and ``after`` (releases; ``after`` is the earlier one where it is asked
        backwards), ``forward``, ``next`` (whether it is the next release), ``outcome``, ``seen`` (whether a release
        set with ``after`` was red without the package and green with it) and ``changed`` (pieces, of the next one).
    """
    cells = {cell.name: cell for cell in table.every}
    results = load()
    rows = []
    for name, said in sorted(declarations().items()):
        for library, specifier in said["claims"].items():
            releases = table.releases.get(library, [])
            proved = [
                (releases.index(cells[cell].pins[library]), cell)
                for cell, report in sorted(reports.items())
                if name in report["fixes"] and cells[cell].pins.get(library) in releases
            ]
            if not specifier or not proved:
                continue
            affected = [release in SpecifierSet(specifier) for release in releases]
            states = [
                {
                    results[name][other].state
                    for other, its in cells.items()
                    if its.pins.get(library) == release and other in results.get(name, {})
                }
                for release in releases
            ]
            healthy = [_is_healthy(states, there) for there in range(len(releases))]
            for at, before in enumerate(releases):
                if not affected[at]:
                    continue
                cell = min(proved, key=lambda pair: (abs(pair[0] - at), pair[0] > at))[1]
                old = read_marks[library, before]
                pieces = [piece for piece in _of(library, reports[cell]["fixes"][name]) if piece in old]
                for there, after in enumerate(releases):
                    if there == at:
                        continue
                    new = read_marks[library, after]
                    follows = there == at + 1
                    changed = any(old[piece] != new.get(piece) for piece in pieces)
                    rows.append(
                        {
                            "fix": name,
                            "library": library,
                            "before": before,
                            "after": after,
                            "forward": there > at,
                            "next": follows,
                            "outcome": _outcome(changed, affected[there], there > at, healthy[there]),
                            "seen": PATCHED in states[there],
                            "changed": sorted(p for p in pieces if old[p] != new.get(p)) if follows else [],
                        }
                    )
    return rows


def _outcome(changed: bool, affected: bool, forward: bool, healthy: bool) -> str:
    if affected:
        return CHANGED if changed else RIGHT
    if changed:
        return NOTICED
    if not forward:
        return BELOW
    return KEPT_AWAY if healthy else WRONG


def _is_healthy(states: list[set[str]], there: int) -> bool:
    """Whether the release sets saw the probe say healthy in a release: in it, or in the nearest ones on both sides."""
    seen = [at for at, found in enumerate(states) if found]
    sides = [[at for at in seen if at <= there][-1:], [at for at in seen if at >= there][:1]]
    return all(side and states[side[0]] <= {HEALTHY, NOT_APPLICABLE} for side in sides)


def _of(library: str, pieces: list[str]) -> list[str]:
    package = PACKAGES.get(library, library)
    return [piece for piece in pieces if piece.startswith((f"{package}.", f"{package}:"))]


# ---------------------------------------------------------------------- what is written


def is_patch(row: dict[str, Any]) -> bool:
    """Whether only the last number of the release differs."""
    return Version(row["before"]).release[:2] == Version(row["after"]).release[:2]


def rate(rows: list[dict[str, Any]]) -> float:
    """Of the steps in which the bug stayed, the share in which the code says so; 1 where there are none."""
    counts = Counter(row["outcome"] for row in rows)
    both = counts[RIGHT] + counts[CHANGED]
    return counts[RIGHT] / both if both else 1.0


def page(rows: list[dict[str, Any]]) -> str:
    """The page for people."""
    lines = [
        "# Would the fixes have gone on by themselves?",
        "",
        "Generated by `python -m tests.upstream.time_machine --write`; do not edit. The first table counts pairs of a",
        "fix and a step from one release to the next, the first of which has the bug: does the second have it too, and",
        "is all code on which the fix relies the same?",
        "",
        "| library | steps | bug stays | accepted | accepted, patch releases | kept away by the probe | wrong |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    pairs, rows = rows, [row for row in rows if row["next"]]
    libraries = [*dict.fromkeys(row["library"] for row in pairs)]
    for library in [*sorted(libraries), ""]:
        mine = [row for row in rows if not library or row["library"] == library]
        counts = Counter(row["outcome"] for row in mine)
        stays = counts[RIGHT] + counts[CHANGED]
        patch = rate([row for row in mine if is_patch(row)])
        count = len({(row["library"], row["before"], row["after"]) for row in mine})
        cells = [
            library or "all",
            count,
            stays,
            f"{rate(mine):.1%}",
            f"{patch:.1%}",
            counts[KEPT_AWAY],
            counts[WRONG],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "## Every pair of releases, both ways",
        "",
        "Not only the next release: all later ones, and all earlier ones, where the number alone keeps a fix away.",
        "",
        "| library | way | bug is there | accepted | seen red and green | bug is not there | noticed by the code "
        "| kept away by the probe | by the number | wrong |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for library in [*sorted(libraries), ""]:
        for forward in (True, False):
            mine = [r for r in pairs if r["forward"] is forward and (not library or r["library"] == library)]
            counts = Counter(row["outcome"] for row in mine)
            seen = sum(row["outcome"] == RIGHT and row["seen"] for row in mine)
            there = counts[RIGHT] + counts[CHANGED]
            cells = [library or "all", "later" if forward else "earlier", there, counts[RIGHT], seen]
            cells += [
                sum(counts.values()) - there,
                *(counts[word] for word in (NOTICED, KEPT_AWAY, BELOW, WRONG)),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "## What was not accepted, and which code changed", ""]
    by_step: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["outcome"] == CHANGED:
            by_step.setdefault((row["library"], row["before"], row["after"]), []).append(row)
    for (library, before, after), mine in sorted(
        by_step.items(), key=lambda item: (item[0][0], Version(item[0][1]))
    ):
        lines.append(f"- {library} {before} to {after}")
        changed = Counter(piece for row in mine for piece in row["changed"])
        for piece, _ in sorted(changed.items(), key=lambda item: (-item[1], item[0]))[:8]:
            fixes = sorted(row["fix"] for row in mine if piece in row["changed"])
            more = f" and {len(fixes) - 4} more" if len(fixes) > 4 else ""
            called = " (its interface)" if piece.endswith(CALLED) else ""
            lines.append(f"  - `{piece.removesuffix(CALLED)}`{called}: {', '.join(fixes[:4])}{more}")
        if len(changed) > 8:
            lines.append(f"  - and {len(changed) - 8} more pieces")
    return "\n".join(lines) + "\n"


def data(rows: list[dict[str, Any]]) -> str:
    """The counts of the steps to the next release, those of all pairs, and where the code is the same and the bug gone;
    one entry a line."""
    pairs, rows = rows, [row for row in rows if row["next"]]
    counts = Counter((row["library"], row["outcome"], is_patch(row)) for row in rows)
    counted = [{"library": library, "outcome": outcome, "patch": patch, "count": count}
               for (library, outcome, patch), count in sorted(counts.items())]  # fmt: skip
    ways = Counter((row["library"], row["forward"], row["outcome"], row["seen"]) for row in pairs)
    both = [{"library": library, "forward": forward, "outcome": outcome, "seen": seen, "count": count}
            for (library, forward, outcome, seen), count in sorted(ways.items())]  # fmt: skip
    gone = Counter((r["fix"], r["library"], r["after"], r["outcome"]) for r in pairs
                   if r["outcome"] in (KEPT_AWAY, WRONG))  # fmt: skip
    other = [{"fix": fix, "library": library, "after": after, "outcome": outcome, "pairs": count}
             for (fix, library, after, outcome), count in sorted(gone.items())]  # fmt: skip
    parts = {"counts": counted, "pairs": both, "same code, bug gone": other}
    blocks = [
        f"{json.dumps(title)}: [\n" + ",\n".join(map(json.dumps, entries)) + "\n]"
        for title, entries in parts.items()
    ]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream.time_machine", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write time_machine.json and TIME_MACHINE.md")
    parser.add_argument(
        "--cells", nargs="+", default=["all"], help="release sets in which it is recorded (default all)"
    )
    parser.add_argument("--fresh", action="store_true", help="record again: the fixes have changed")
    parser.add_argument("--folder", type=Path, default=None, help="as of `python -m tests.upstream`")
    arguments = parser.parse_args()
    table, folder = read(), arguments.folder or cache_folder()
    reports = recorded(
        [cell for cell in table.select(arguments.cells) if not cell.alone], folder, arguments.fresh
    )
    pieces = {piece for report in reports.values() for piece in report["marks"]}
    rows = steps(table, reports, sources(table, pieces, folder))
    text = page(rows)
    print("\n".join(text.splitlines()[6:16]))
    if arguments.write:
        FILE.write_text(data(rows), encoding="utf-8")
        PAGE.write_text(text, encoding="utf-8")
    return 1 if any(row["outcome"] == WRONG for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
