"""`check` against what the matrix saw: the defects that showed on a release set are listed for its pins, no others."""

from __future__ import annotations

import pytest

from diffusers_quantfix.advisories.findings import AFFECTED, findings, table
from diffusers_quantfix.advisories.upgrades import upgrades
from tests.upstream import tables
from tests.upstream.cells import Cell, read
from tests.upstream.verdict import APPLIED, HEALTHY, PATCHED

# Pins that only the code can tell from affected ones: the probe says healthy inside the claim.
ONLY_THE_PROBE_KNOWS: set[tuple[str, str]] = set()


def seen() -> dict[str, dict[str, str]]:
    """The grid of the compatibility page: cell -> fix -> sign; sets that were not run are left out."""
    grid: dict[str, dict[str, str]] = {}
    heads: list[str] = []
    for line in tables.PAGE.read_text(encoding="utf-8").splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[0] == "fix":
            heads = row[1:] if row[1] in {cell.name for cell in read().cells} else []
        elif heads and len(row) == len(heads) + 1 and set(row[0]) - {"-"}:
            for head, sign in zip(heads, row[1:], strict=True):
                if sign != "?":
                    grid.setdefault(head, {})[row[0]] = sign
    return grid


SEEN = seen()
KNOWN = {row["id"] for row in table()}


def pins_of(cell: Cell) -> dict[str, str]:
    return {name: f"=={version}" for name, version in {"torch": read().torch, **cell.pins}.items()}


@pytest.mark.parametrize(
    "cell", [cell for cell in read().cells if cell.name in SEEN], ids=lambda cell: cell.name
)
def test_what_was_seen_is_what_is_said(cell: Cell):
    said = {finding.fix.id: finding.verdict for finding in findings(pins_of(cell))}
    for fix_id, sign in SEEN[cell.name].items():
        if fix_id not in KNOWN:
            continue
        if sign in (tables.SIGNS[PATCHED], tables.SIGNS[APPLIED]):
            assert said.get(fix_id) == AFFECTED, f"{fix_id} showed in {cell.name} and is not listed"
        elif sign == tables.SIGNS[HEALTHY] and (fix_id, cell.name) not in ONLY_THE_PROBE_KNOWS:
            assert fix_id not in said, f"{fix_id} did not show in {cell.name} and is listed"


def test_no_defect_was_seen_where_upstream_is_said_to_have_fixed_it():
    cells = {cell.name: cell for cell in read().cells}
    for name, signs in SEEN.items():
        pins = pins_of(cells[name])
        for upgrade in upgrades(pins, findings(pins)):
            later = {**pins, **{name: f"=={version}" for name, version in upgrade.releases.items()}}
            assert not {finding.fix.id for finding in findings(later)} & set(upgrade.fixes)
        shown = {fix_id for fix_id, sign in signs.items() if sign == tables.SIGNS[PATCHED]}
        for row in table():
            if row["fixed_in"] and row["id"] in shown:
                releases = (release.split() for release in row["fixed_in"].split(" with "))
                fixed = findings({**pins, **{library: f"=={version}" for library, version in releases}})
                assert row["id"] not in {finding.fix.id for finding in fixed}


def test_the_page_has_enough_to_test_against():
    assert len(SEEN) >= 13
    assert sum(len(signs) for signs in SEEN.values()) >= 13 * 20
