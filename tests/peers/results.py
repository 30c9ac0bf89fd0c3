"""The committed counts of the runs, `results.json`: one line for each library, release set and place."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from packaging.version import Version

from .compare import Comparison

FILE = Path(__file__).with_name("results.json")
Results = dict[str, dict[str, Any]]  # "SET LIBRARY PLACE" -> what `row` gives


def row(release: str, date: str, found: Comparison, unsteady: list[str]) -> dict[str, Any]:
    """What is kept of one run.

    Args:
        release: of the library.
        date: YYYY-MM-DD.
        found: the comparison of the two sides.
        unsteady: the tests that differed, and agreed when they were repeated.
    """
    return {
        "release": release,
        "date": date,
        "same": dict(sorted(found.same.items())),
        "intended": len(found.meant),
        "unsteady": len(unsteady),
        "different": len(found.different),
    }


def load(path: Path = FILE) -> Results:
    """Read the file; nothing where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(results: Results, path: Path = FILE) -> None:
    """Write the file, one line a run."""
    lines = [f"{json.dumps(name)}: {json.dumps(said)}" for name, said in sorted(results.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def sets(results: Results) -> list[str]:
    """The release sets that were run."""
    return sorted({name.split()[0] for name in results})


def lines(results: Results) -> list[str]:
    """One line for each library, over its runs (a set in a place is one), for the page of compatibility."""
    said = []
    for library in sorted({name.split()[1] for name in results}):
        runs = [one for name, one in results.items() if name.split()[1] == library]
        releases = ", ".join(sorted({one["release"] for one in runs}, key=Version))
        same: Counter[str] = Counter()
        for one in runs:
            same.update(one["same"])
        passed, skipped = same.pop("passed", 0), same.pop("skipped", 0)
        differ = sum(one["intended"] + one["different"] for one in runs)
        number = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
        said.append(
            f"- {library} {releases}, {number}: {passed} pass, {same.total()} fail and {skipped} are skipped on both "
            f"sides; {differ or 'none'} end otherwise with it"
        )
    return said
