"""The committed results of the matrix, `results.json`: on each release set, what was seen of each fix.

One line per fix: set -> ``STATE KEY DATE``.  The key stands for what a result depends on: the pins of the set, the
target of the fix, and which parts of its claim fit these pins.  So a changed claim makes results of its own fix stale
and no others, and of those only the ones on sets where the claim's answer has changed: a claim that is extended to a
new release keeps what was seen on the older ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .cells import Cell, Table, digest, fits
from .verdict import FAILED

FILE = Path(__file__).with_name("results.json")
Declarations = Mapping[str, Mapping[str, Any]]


class Seen(NamedTuple):
    """What was seen of one fix on one set.

    Attributes:
        state: of `verdict`.
        key: `key` at that time.
        date: YYYY-MM-DD.
    """

    state: str
    key: str
    date: str


Results = dict[str, dict[str, Seen]]  # fix -> set -> what was seen there


def key(said: Mapping[str, Any], cell: Cell) -> str:
    """What a result of a fix on a set depends on, as 8 characters."""
    claims = [[name, fits({name: spec}, cell.pins)] for name, spec in sorted(said["claims"].items())]
    return digest([cell.key, said["module"], claims])[:8]


def load(path: Path = FILE) -> Results:
    """Read the file; nothing where there is none."""
    if not path.exists():
        return {}
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {
        fix_id: {name: Seen(*text.rsplit(" ", 2)) for name, text in row.items()}
        for fix_id, row in raw.items()
    }


def save(results: Results, path: Path = FILE) -> None:
    """Write the file, one line per fix, so that a change of one fix is a change of one line."""
    lines = [
        f"{json.dumps(fix_id)}: {json.dumps({name: ' '.join(seen) for name, seen in sorted(row.items())})}"
        for fix_id, row in sorted(results.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def valid(results: Results, said: Declarations, table: Table) -> Results:
    """The results that are about today's declarations and sets."""
    cells = {cell.name: cell for cell in table.every}
    return {
        fix_id: {
            name: seen
            for name, seen in results.get(fix_id, {}).items()
            if name in cells and seen.key == key(said[fix_id], cells[name])
        }
        for fix_id in sorted(said)
    }


def merged(results: Results, ran: list[dict[str, Any]], said: Declarations, table: Table) -> Results:
    """The results with those of a run of the driver; what is stale is dropped.

    Args:
        results: as they are.
        ran: results of `run_cell`; a set with failures is passed over, since it proves nothing.
        said: the declarations.
        table: the sets.
    """
    new = valid(results, said, table)
    cells = {cell.name: cell for cell in table.every}
    for result in ran:
        cell = cells.get(result["cell"])
        if cell is None or result["failures"] or result["pins"] != cell.pins:
            continue
        for fix_id, found in result["fixes"].items():
            if fix_id in new and found["state"] != FAILED:
                new[fix_id][cell.name] = Seen(found["state"], key(said[fix_id], cell), result["date"])
    return new
