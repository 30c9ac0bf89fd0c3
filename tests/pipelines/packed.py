"""The results of all release sets in a few tens of kB: `pipelines.json` of the package, and the data of the web page.

Its keys:

- ``placements``: names.
- ``reasons``: the first sentences of errors.
- ``outcomes``: distinct rows: a string with a sign for each placement, of ``advisories/pipelines.py``, and the numbers
  of the errors in the same order.
- ``releases``: the newest first, each with ``versions`` and ``backends``.
- ``not_built``: for each release: name -> why.
- ``pipelines``: name -> for each release None, or for each backend the number of its row, -1 where it was not run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from diffusers_quantfix.advisories.pipelines import EXACT, FILE, PLACEMENTS, UPSTREAM, WRONG
from tests.pipelines import results
from tests.pipelines.families import NOT_BUILT

PATH: Path = FILE
LEAD = "upstream: "


def packed(sets: dict[str, dict]) -> dict[str, Any]:
    """The data of ``sets``: file name -> results, the newest first."""
    all_names = sorted({name for found in sets.values() for name in found["outcomes"]})
    said = {
        placement
        for found in sets.values()
        for backends in found["outcomes"].values()
        for outcomes in backends.values()
        for placement in outcomes
    }
    placements = [one for one in PLACEMENTS if one in said]
    if unnamed := said - set(placements) - {"build", "load"}:
        raise ValueError(f"advisories/pipelines.py names no placement {', '.join(sorted(unnamed))}")
    reasons: dict[str, int] = {}
    rows: dict[str, int] = {}
    releases, pipelines, not_built = [], {name: [] for name in all_names}, []
    for number, found in enumerate(sets.values()):
        backends = sorted({backend for one in found["outcomes"].values() for backend in one})
        releases.append({"versions": found["versions"], "backends": backends})
        not_built.append(dict(sorted(NOT_BUILT.items())) if number == 0 else {})
        for name in all_names:
            outcomes = found["outcomes"].get(name, {})
            errors = {one.get("build", results.EXACT) for one in outcomes.values()} - {results.EXACT}
            if errors:
                not_built[-1][name] = sorted(errors)[0]
            if not outcomes or errors:
                pipelines[name].append(None)
                continue
            pipelines[name].append([_row(outcomes.get(one), placements, reasons, rows) for one in backends])
    return {
        "about": "Generated from tests/pipelines/results*.json by `python -m tests.pipelines.table --write`",
        "placements": placements,
        "reasons": list(reasons),
        "outcomes": [json.loads(row) for row in rows],
        "releases": releases,
        "not_built": not_built,
        "pipelines": {name: row for name, row in pipelines.items() if any(row)},
    }


def _row(outcomes: dict | None, placements: list[str], reasons: dict[str, int], rows: dict[str, int]) -> int:
    """The number of a row of outcomes, -1 where the backend was not run."""
    if outcomes is None:
        return -1
    load = outcomes.get("load", results.EXACT)
    signs, numbers = [], []
    for placement in placements:
        said = outcomes.get(placement) if load == results.EXACT else load
        if said is None:
            signs.append(" ")
        elif said == results.EXACT:
            signs.append(EXACT)
        else:
            signs.append(UPSTREAM if said.startswith(LEAD) else WRONG)
            reason = re.split(r"(?<=\w[.!]) ", said.removeprefix(LEAD), maxsplit=1)[0]
            reason = reason.removeprefix("AssertionError: ")
            numbers.append(reasons.setdefault(reason, len(reasons)))
    return rows.setdefault(json.dumps(["".join(signs).rstrip(), numbers]), len(rows))


def text(sets: dict[str, dict]) -> str:
    """The file: a line for each pipeline, row and reason, so that a change of one is a change of one line."""
    parts = []
    for key, value in packed(sets).items():
        if isinstance(value, dict):
            lines = [f"{json.dumps(name)}: {_short(one)}" for name, one in value.items()]
            parts.append(f'"{key}": {{\n' + ",\n".join(lines) + "\n}")
        elif isinstance(value, list):
            parts.append(f'"{key}": [\n' + ",\n".join(map(_short, value)) + "\n]")
        else:
            parts.append(f'"{key}": {_short(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
