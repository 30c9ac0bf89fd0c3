"""The releases at the edges of a claim, and whether the cells hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from .cells import Cell, fits
from .verdict import HEALTHY, NOT_APPLICABLE


def edges(specifier: str, releases: list[str]) -> tuple[str, str]:
    """(last affected, first healthy) release of a range; empty where there is none.

    Args:
        specifier: of a claim, one distribution.
        releases: all releases of it, ascending.
    """
    inside = [release for release in releases if release in SpecifierSet(specifier)]
    if not inside:
        return "", ""
    later = releases[releases.index(inside[-1]) + 1 :]
    return inside[-1], later[0] if later else ""


def uncovered(
    claims: Mapping[str, str], fixed_in: str, releases: Mapping[str, list[str]], cells: Iterable[Cell]
) -> list[str]:
    """What the cells lack to prove the upper edge of every range of a claim, as sentences; empty when nothing.

    Both the last affected and the first healthy release must stand in a cell where the rest of the claim fits.
    """
    cells, missing = list(cells), []
    for name, specifier in claims.items():
        if not specifier:
            continue  # it has to be there, in whatever release
        if name not in releases:
            missing.append(f"{name} has no list of releases")
            continue
        last, first = edges(specifier, releases[name])
        if not last:
            missing.append(f"no release of {name} is in {specifier}")
            continue
        others = {other: spec for other, spec in claims.items() if other != name}
        for release, role in ((last, "last affected"), (first, "first healthy")):
            if release and not any(
                cell.pins.get(name) == release and fits(others, cell.pins) for cell in cells
            ):
                rest = f" with {', '.join(f'{o} {s}' for o, s in others.items())}" if others else ""
                missing.append(f"no cell has {name} {release}, the {role} release,{rest}".rstrip(","))
    if fixed_in and " with " not in fixed_in:  # several only fix together, inside the claim
        name, _, release = fixed_in.partition(" ")
        first = edges(claims[name], releases[name])[1] if name in claims and name in releases else ""
        if release != first:
            missing.append(
                f"it is said to be fixed in {fixed_in}, but by its claim that is {name} {first or 'never'}"
            )
    return missing


def loose(
    claims: Mapping[str, str],
    fix_id: str,
    releases: Mapping[str, list[str]],
    results: Iterable[tuple[Cell, dict[str, Any]]],
) -> list[str]:
    """The ends of a claim where the defect shows in no cell, as sentences: there the claim is too wide.

    Args:
        claims: distribution -> specifier.
        fix_id: whose claim it is.
        releases: all releases of each distribution, ascending.
        results: every cell with its result; those that hold an end decide.
    """
    inside = [
        (cell, result["fixes"].get(fix_id, {})) for cell, result in results if fits(dict(claims), cell.pins)
    ]
    found = []
    for name, specifier in claims.items():
        known = [release for release in releases.get(name, ()) if release in SpecifierSet(specifier)]
        for release in dict.fromkeys([known[0], known[-1]] if known and specifier else ()):
            states = [said.get("state") for cell, said in inside if cell.pins[name] == release]
            if states and all(state in (HEALTHY, NOT_APPLICABLE) for state in states) and HEALTHY in states:
                found.append(f"its claim on {name} is too wide: with {release} the defect shows in no cell")
    return found
