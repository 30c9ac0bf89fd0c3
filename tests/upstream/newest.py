"""``--add``: a release set that is not in the table yet, and what became of every fix in it.

What is named is pinned, everything else is the newest that the registry and each other's requirements allow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from .cells import MAIN, Cell, Table, digest
from .environments import resolve
from .report import Progress, summary
from .run_cell import run_cell
from .verdict import FAILED, Run, Verdict, box, judge

RETIRED = "retired"
APPLIES = "still applies"
UNCLAIMED = "still there, not claimed"
DRIFTED = "drifted"
ELSEWHERE = "not concerned"
NEWS = (DRIFTED, UNCLAIMED, RETIRED, APPLIES, ELSEWHERE)


def wanted(words: list[str], table: Table) -> Cell:
    """The cell that the words ask for.

    Raises:
        ValueError: a word is not NAME=RELEASE.
    """
    pins = {"torch": table.torch, **table.shared, **dict.fromkeys(MAIN, "")}
    # peft is released in step with the newest transformers; an old pin would hold the others back.
    pins["peft"] = ""
    for word in words:
        name, equals, release = word.partition("=")
        release = release.lstrip("=")
        if not (name and equals and release):
            raise ValueError(f"{word!r} is not NAME=RELEASE, as in diffusers=0.43.0 or bitsandbytes=latest")
        pins[name] = "" if release == "latest" else release
    return Cell(f"new-{digest(sorted(words))[:6]}", table.python, pins)


def news(found: dict[str, Any], state: str, shown: bool) -> tuple[str, str]:
    """(what became of one fix, the sentence what to do), from its inspection and its tests."""
    claim, probe = found["claim"], found["probe"]
    if claim == "fits":
        if probe == "healthy":
            if box(found):
                return RETIRED, f"healthy with {found['why']} together; see what it is beside older releases"
            return RETIRED, f"close its claim below {found['why']} and name that release in fixed"
        if probe == "broken" and found["patch"] == "ok" and state != FAILED:
            return APPLIES, "nothing to do" if shown else "nothing to do, but no test could show it here"
        if probe == "broken" and found["patch"] == "ok":
            return DRIFTED, "the patch takes, but a test of it fails; see the failures"
        return DRIFTED, found["patch"] if probe == "broken" else found["detail"]
    if claim == "out-of-range" and probe == "broken":
        patch = "the patch takes" if found["patch"] == "ok" else f"the patch does not take: {found['patch']}"
        return (
            UNCLAIMED,
            f"{found['why']}, but the probe says broken; {patch}; widen its claim if the tests agree",
        )
    if claim == "unreadable" or probe == "failed":
        return DRIFTED, found["detail"] or found["why"]
    return ELSEWHERE, found["why"] or found["detail"]


def assess(
    ids: list[str], bare: Run, patched: Run, found: dict[str, dict[str, Any]], untested_ok: bool = False
) -> Verdict:
    """Judge a set that nobody has pinned: retirement and an open claim are news there, not failures."""
    verdict = judge(ids, bare, patched, found, untested_ok)
    for fix_id in ids:
        if fix_id not in found:
            continue
        said = verdict.fixes[fix_id]
        shown = any(
            test["outcome"] == "passed" and test["gates"].get(fix_id, "").startswith("broken")
            for test in bare.tests.values()
        )
        failed = any(
            test["outcome"] == "failed" and fix_id in test.get("fixes", ())
            for run in (bare, patched)
            for test in run.tests.values()
        )
        said["news"], said["todo"] = news(found[fix_id], FAILED if failed else "", shown)
        if said["news"] in (RETIRED, UNCLAIMED):
            # What its tests then say on the bare side follows from it; the fix itself is judged above.
            verdict.failures = [line for line in verdict.failures if not line.startswith(f"{fix_id}: ")]
            of_it = {name for run in (bare, patched) for name, test in run.tests.items()
                     if fix_id in test.get("fixes", ())}  # fmt: skip
            if said["news"] == UNCLAIMED:
                verdict.failures = [
                    line for line in verdict.failures if not any(f": {name}: " in line for name in of_it)
                ]
    return verdict


def run(words: list[str], table: Table, folder: Path) -> int:
    """Build the set, run everything, say what is new; 1 when something drifted or failed."""
    cell = wanted(words, table)
    log = folder / "logs" / cell.name / "resolve.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    releases = resolve(
        cell, log
    )  # pinned from here on, so that tomorrow's newest gets an environment of its own
    cell = replace(cell, pins={name: releases.get(name, release) for name, release in cell.pins.items()})
    progress = Progress(1)
    result = run_cell(cell, folder, lambda name: progress.phase(cell.name, name), assess, try_candidates=True)
    progress.finished(result, reused=False)
    progress.close()
    print(summary([result]))
    print(report(result, table))
    return int(bool(result["failures"]))


def report(result: dict[str, Any], table: Table) -> str:
    """What became of the fixes, and the row to append."""
    lines: list[str] = []
    counts = Counter(said.get("news", DRIFTED) for said in result["fixes"].values())
    for kind in NEWS:
        concerned = {i: said for i, said in result["fixes"].items() if said.get("news", DRIFTED) == kind}
        if concerned and kind != ELSEWHERE:
            lines += ["", f"{kind}:"]
            lines += [f"  {fix_id}: {said.get('todo') or said['why']}" for fix_id, said in concerned.items()]
    lines += [
        "",
        ", ".join(f"{counts[kind]} {kind}" for kind in NEWS if counts[kind]) or "no fix is declared",
    ]
    installed = {name.lower(): release for name, release in result.get("installed", {}).items()}
    if installed:
        lines += ["", "The row for tests/upstream/cells.toml:", "", *row(installed, table)]
        unknown = {
            name: installed[name] for name in MAIN if installed[name] not in table.releases.get(name, ())
        }
        if unknown:
            said = ", ".join(f"{name} {release}" for name, release in unknown.items())
            lines += [
                "",
                f"and for its [releases]: {said} (with the releases before that are not listed yet)",
            ]
    return "\n".join(lines)


def row(installed: dict[str, str], table: Table) -> list[str]:
    """The lines of a cell with these releases."""
    taken = {cell.name for cell in table.cells}
    name = next(f"D{number:02}" for number in range(1, 1000) if f"D{number:02}" not in taken)
    lines = ["[[cell]]", f'name = "{name}"', *(f'{library} = "{installed[library]}"' for library in MAIN)]
    for library, release in table.shared.items():
        if library == "peft" and installed.get(library, release) != release:
            lines.append(f'{library} = "{installed[library]}"')
    same = [cell.name for cell in table.cells if all(cell.pins[n] == installed[n] for n in MAIN)]
    return [*lines, f"(the same releases as {same[0]})"] if same else lines
