"""`check` against what the matrix saw: the defects that showed on a release set are listed for its pins, no others."""

from __future__ import annotations

import pytest
from packaging.version import Version

from diffusers_quantfix.advisories.findings import AFFECTED, findings, table
from diffusers_quantfix.advisories.upgrades import upgrades
from tests.upstream import results
from tests.upstream.cells import Cell, read
from tests.upstream.run_cell import declarations
from tests.upstream.verdict import APPLIED, HEALTHY, PATCHED

# Pins that only the code can tell from affected ones: the probe says healthy inside the claim.
# diffusers-gguf-compile: diffusers before 0.37 has it up to torch 2.11 only, newer ones with every torch.
ONLY_THE_PROBE_KNOWS: set[tuple[str, str]] = {
    ("diffusers-gguf-compile", cell.name)
    for cell in read().cells
    if Version(cell.pins.get("torch", read().torch)) >= Version("2.12")
    if Version(cell.pins["diffusers"]) < Version("0.37")
}


def seen() -> dict[str, dict[str, str]]:
    """The committed results that are about today's declarations: cell -> fix -> state."""
    grid: dict[str, dict[str, str]] = {}
    for fix_id, row in results.valid(results.load(), declarations(), read()).items():
        for name, found in row.items():
            grid.setdefault(name, {})[fix_id] = found.state
    return grid


SEEN = seen()
KNOWN = {row["id"] for row in table()}


def pins_of(cell: Cell) -> dict[str, str]:
    return {name: f"=={version}" for name, version in {"torch": read().torch, **cell.pins}.items()}


@pytest.mark.parametrize(
    "cell", [cell for cell in read().cells if cell.name in SEEN], ids=lambda cell: cell.name
)
def test_what_was_seen_is_what_is_said(cell: Cell):
    said = {finding.id: finding.verdict for finding in findings(pins_of(cell))}
    for fix_id, state in SEEN[cell.name].items():
        if fix_id not in KNOWN:
            continue
        if state in (PATCHED, APPLIED):
            assert said.get(fix_id) == AFFECTED, f"{fix_id} showed in {cell.name} and is not listed"
        elif state == HEALTHY and (fix_id, cell.name) not in ONLY_THE_PROBE_KNOWS:
            assert fix_id not in said, f"{fix_id} did not show in {cell.name} and is listed"


def test_no_defect_was_seen_where_upstream_is_said_to_have_fixed_it():
    cells = {cell.name: cell for cell in read().cells}
    for name, cell in cells.items():
        pins, states = pins_of(cell), SEEN.get(name, {})
        for upgrade in upgrades(pins, findings(pins)):
            later = {**pins, **{name: f"=={version}" for name, version in upgrade.releases.items()}}
            assert not {finding.id for finding in findings(later)} & set(upgrade.fixes)
        shown = {fix_id for fix_id, state in states.items() if state == PATCHED}
        for row in table():
            if row["fixed_in"] and row["id"] in shown:
                releases = (release.split() for release in row["fixed_in"].split(" with "))
                fixed = findings({**pins, **{library: f"=={version}" for library, version in releases}})
                assert row["id"] not in {finding.id for finding in fixed}


def test_there_are_enough_results_to_test_against():
    sets = [SEEN[cell.name] for cell in read().cells if cell.name in SEEN]
    assert len(sets) >= 13
    assert sum(map(len, sets)) >= 13 * 20
