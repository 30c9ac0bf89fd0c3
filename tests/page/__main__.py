"""``python -m tests.page FILE``: the results of pipelines and fixes as one HTML file that a browser opens."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from diffusers_quantfix.advisories.pipelines import BACKENDS, PLACEMENTS
from tests.pipelines import packed, table
from tests.upstream import cells, results
from tests.upstream.run_cell import declarations
from tests.upstream.tables import UNKNOWN
from tests.upstream.verdict import NOT_APPLICABLE

TEMPLATE = Path(__file__).with_name("page.html")


def data() -> dict[str, Any]:
    """What the page shows.

    Returns:
        ``pipelines``: of `packed.packed`, with ``backend_names`` and ``placement_names``, as people call them.
        ``grids``: of fixes, each with ``title``, ``columns`` (``name`` and ``versions``), and ``rows``: for each fix
        its state on each column, None where nothing was run. ``fixes``: id -> ``title`` and ``symptom``.
    """
    said, all_sets = declarations(), cells.read()
    seen = results.valid(results.load(), said, all_sets)
    grids = [_grid("release sets", all_sets.cells, sorted(said), said, seen)]
    for library in dict.fromkeys(cell.alone for cell in all_sets.ranges):
        alone = [name for name in sorted(said) if set(said[name]["claims"]) == {library}]
        rows = [cell for cell in all_sets.ranges if cell.alone == library]
        grids.append(_grid(f"every {library} on its own", rows, alone, said, seen, library))
    return {
        "pipelines": packed.packed(table.files()),
        "backend_names": BACKENDS,
        "placement_names": PLACEMENTS,
        "grids": grids,
        "fixes": {
            name: {"title": one["title"], "symptom": " ".join(one["symptom"].split())}
            for name, one in said.items()
        },
    }


def _grid(
    title: str, sets: list[cells.Cell], names: list[str], said: dict, seen: dict, library: str = ""
) -> dict[str, Any]:
    def state(name: str, cell: cells.Cell) -> str:
        if (found := seen[name].get(cell.name)) is not None:
            return str(found.state)
        return UNKNOWN if set(said[name]["claims"]) <= set(cell.pins) else NOT_APPLICABLE

    columns = [
        {
            "name": cell.pins[library] if library else cell.name,
            "versions": {"python": cell.python, **cell.pins},
        }
        for cell in sets
    ]
    return {
        "title": title,
        "columns": columns,
        "rows": {name: [state(name, cell) for cell in sets] for name in names},
    }


def html() -> str:
    """The page; its data is in a script element, where only ``</`` would end it."""
    text = json.dumps(data(), separators=(",", ":")).replace("</", "<\\/")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", text)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.page", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path, help="the HTML file to write")
    file = parser.parse_args(argv).file
    file.write_text(html(), encoding="utf-8")
    print(f"{file}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
