"""``--add``: a release set that is not in the table yet, and what became of every fix in it.

What is named is pinned, everything else is the newest that the registry and each other's requirements allow.

With ``--write`` the set and its releases are written into `cells.toml`, every claim that the set decides is extended or
closed in the source of its fix, and the set runs again, now with these claims: a claim that is extended must then be
red without us and green with us, one that is closed idle; otherwise its edit is taken back and reported.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from packaging.version import Version

from diffusers_quantfix.advisories import supported
from diffusers_quantfix.fixes.targets import PACKAGES, TARGETS
from tests import index

from . import cells, changed_code, claims, proved_code, results, tables
from .cells import MAIN, Cell, Table, digest
from .edges import uncovered
from .environments import prepare, resolve, sources
from .report import Progress, summary
from .run_cell import ROOT, declarations, run_cell
from .verdict import FAILED, HEALTHY, PATCHED, Run, Verdict, box, judge

RETIRED = "retired"
APPLIES = "still applies"
UNCLAIMED = "still there, not claimed"
DRIFTED = "drifted"
ELSEWHERE = "not concerned"
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
NEWS = (DRIFTED, UNCLAIMED, RETIRED, APPLIES, ELSEWHERE)


def wanted(words: list[str], table: Table) -> Cell:
    """The cell that the words ask for.

    Raises:
        ValueError: a word is not NAME=RELEASE.
    """
    pins = {"torch": table.torch, **table.shared, **dict.fromkeys(MAIN, "")}
    # What the newest set has beside the four: without it the fixes that need it would not be asked.
    pins |= dict.fromkeys(_last(table).extra, "")
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
                return RETIRED, f"healthy with {found['why']} together; try it beside older releases"
            return RETIRED, f"close its claim below {found['why']} and name that release in fixed_in"
        if probe == "broken" and found["patch"] == "ok" and state != FAILED:
            return APPLIES, "nothing to do" if shown else "nothing to do, but no test could reproduce it here"
        if probe == "broken" and found["patch"] == "ok":
            return DRIFTED, "the patch takes, but a test of it fails; see the failures"
        return DRIFTED, found["patch"] if probe == "broken" else found["detail"]
    if claim == "out-of-range" and probe == "broken":
        patch = "the patch takes" if found["patch"] == "ok" else f"the patch does not take: {found['patch']}"
        return (
            UNCLAIMED,
            f"{found['why']}, but the probe says broken; {patch}; extend its claim (`--write` tests it and does)",
        )
    if claim == "unreadable" or probe == "failed":
        return DRIFTED, found["detail"] or found["why"]
    return ELSEWHERE, found["why"] or found["detail"]


def assess(
    ids: list[str], bare: Run, patched: Run, found: dict[str, dict[str, Any]], untested_ok: bool = False
) -> Verdict:
    """Judge a set that is not in the table: a fixed bug and an open claim are news there, not failures."""
    verdict = judge(ids, bare, patched, found, untested_ok)
    for fix_id in ids:
        if fix_id not in found:
            continue
        said = verdict.fixes[fix_id]
        answer = patched.board.get(fix_id, {})
        if answer.get("same_code") or answer.get("above"):
            said["by_itself"] = bool(answer.get("same_code"))
            said["said"] = answer.get("reason", "")
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


def run(words: list[str], table: Table, folder: Path, write: bool = False) -> int:
    """Build the set, run everything, print what is new; 1 when something drifted or failed.

    Args:
        words: NAME=RELEASE, of the libraries that are not to be the newest.
        table: the sets that are known.
        folder: where environments, logs and results are kept.
        write: write down what was found, see the docstring of this module.
    """
    cell = wanted(words, table)
    log = folder / "logs" / cell.name / "resolve.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # pinned from here on, so that tomorrow's newest gets an environment of its own
    releases = resolve(cell, log)
    cell = replace(cell, pins={name: releases.get(name, release) for name, release in cell.pins.items()})
    result = _run(cell, folder, assess=assess, try_candidates=True, quick=write)
    seen, last = results.load(), _last(table).name
    for fix_id, said in result["fixes"].items():
        before = seen.get(fix_id, {}).get(last)
        if said.get("news") == RETIRED and before and before.state == HEALTHY:
            said["news"], said["todo"] = ELSEWHERE, f"healthy, as in {last}"
    print(report(result, table))
    print("\n".join(by_itself(result["fixes"], cell.pins, folder)))
    if not write or "installed" not in result:
        return int(bool(result["failures"]))
    return _write(cell, result, table, folder)


def _run(cell: Cell, folder: Path, **how: Any) -> dict[str, Any]:
    progress = Progress(1)
    result = run_cell(cell, folder, lambda name: progress.phase(cell.name, name), **how)
    progress.finished(result, reused=False)
    progress.close()
    print(summary([result]))
    return result


def _write(cell: Cell, result: dict[str, Any], table: Table, folder: Path) -> int:
    """Write the set and the claims that it decides, and prove them; 1 when something is left to a person."""
    said, by_hand, changes = declarations(), {}, []
    for fix_id, found in result["fixes"].items():
        change, why = claims.decide(fix_id, said[fix_id], found, cell.pins, table)
        if change:
            changes.append(change)
        elif why or found.get("news") in (DRIFTED, RETIRED):
            by_hand[fix_id] = why or found["todo"]
    sources = {claims.source(change.fix_id, ROOT) for change in changes}
    before = {source: source.read_text("utf-8") for source in sources}
    for change in changes:
        try:
            source = claims.source(change.fix_id, ROOT)
            _put(change.fix_id, claims.edited(source.read_text("utf-8"), change))
        except ValueError as error:
            by_hand[change.fix_id] = f"write {change.text} yourself: {error}"
    table, cell = _with_set(cell, table)
    # The tests of all fixes, the deep ones too, on the set as it is pinned from now on.
    proof = _run(cell, folder)
    kept = []
    for change in changes:
        if change.fix_id in by_hand:
            continue
        state = proof["fixes"].get(change.fix_id, {}).get("state")
        if state == (HEALTHY if change.fixed_in else PATCHED):
            kept.append(change)
            continue
        by_hand[change.fix_id] = f"{change.text} was not confirmed: its state with that claim is {state}"
        source = claims.source(change.fix_id, ROOT)
        text = before[source]
        for other in changes:  # those of the other targets of this fix stay
            if other.fix_id not in by_hand and claims.source(other.fix_id, ROOT) == source:
                text = claims.edited(text, other)
        _put(change.fix_id, text)
    for fix_id in by_hand:  # what was seen of it belongs to another claim
        if fix_id in proof["fixes"]:
            proof["fixes"][fix_id]["state"] = FAILED
    said = declarations()
    results.save(results.merged(results.load(), [proof], said, table))
    tables.write()
    if all(cell.pins.get(name) == newest for name, (_, newest) in supported.RELEASES.items()):
        pin(cell)
        by_hand |= record(cell, folder)
    for fix_id, fix in said.items():
        if lacks := uncovered(fix["claims"], fix["fixed_in"], table.known, table.every):
            by_hand.setdefault(fix_id, "; ".join(lacks))
    print(written(kept, by_hand, cell, bool(proof["failures"])))
    return int(bool(by_hand or proof["failures"]))


def pin(cell: Cell) -> None:
    """Pin the newest releases in the README's two commands, too."""
    text = CONSTRAINTS.read_text(encoding="utf-8")
    for name, release in cell.pins.items():
        if name in supported.RELEASES:
            text = re.sub(rf"(?m)^{re.escape(name)}==.*$", f"{name}=={release}", text)
    CONSTRAINTS.write_text(text, encoding="utf-8")


def record(cell: Cell, folder: Path) -> dict[str, str]:
    """Record the code of the newest releases, on which the fixes are proved now.

    Returns:
        What could not be done -> why.
    """
    log = folder / "logs" / cell.name / "proved_code.log"
    environment = prepare(cell, folder, log)
    done = subprocess.run(
        [str(environment.python), "-m", "tests.upstream.proved_code", "--write"],
        cwd=ROOT, env={**os.environ, **environment.variables, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode == 0:
        return {}
    return {"proved_code.json": f"the code could not be recorded, see {log}"}


def _put(fix_id: str, text: str) -> None:
    """Write the source of a fix, and read its declaration again."""
    source = claims.source(fix_id, ROOT)
    source.write_text(text, encoding="utf-8")
    _forget_bytecode(source)
    module = sys.modules.get(f"diffusers_quantfix.fixes.{TARGETS[fix_id].file}")
    if module is not None:
        importlib.reload(module)
    index.write()  # the processes of the next run read the claims there


def _forget_bytecode(source: Path) -> None:
    """Python takes its bytecode for that of a new text if both have the same size and second."""
    Path(cache_from_source(str(source))).unlink(missing_ok=True)
    importlib.invalidate_caches()


def _with_set(cell: Cell, table: Table) -> tuple[Table, Cell]:
    """The table with this set in it, written down, and the set under its name there."""
    same = [known for known in table.cells if known.pins == cell.pins]
    lines = [] if same else row(cell.pins, table)
    new = {
        name: release
        for name, release in cell.pins.items()
        if name in table.releases and release not in table.releases[name]
    }
    text = cells.TABLE.read_text(encoding="utf-8")
    cells.TABLE.write_text(claims.with_set(text, lines, new), encoding="utf-8")
    table = cells.read()
    ends = Path(supported.__file__)
    ends.write_text(claims.with_ends(ends.read_text(encoding="utf-8"), table.releases), encoding="utf-8")
    _forget_bytecode(ends)
    importlib.reload(supported)
    name = same[0].name if same else lines[1].split('"')[1]
    return table, next(known for known in table.cells if known.name == name)


def written(kept: list[claims.Change], by_hand: dict[str, str], cell: Cell, failed: bool) -> str:
    """What was written, and what a person must decide."""
    lines = ["", f"written: set {cell.name} ({cell.title}), the claims below, the generated pages"]
    if failed:
        again = f"python -m tests.upstream --cells {cell.name} --write"
        lines.append(f"not written: its results, since its run has failures; when they are solved: {again}")
    for kind, some in (
        ("extended", [change for change in kept if not change.fixed_in]),
        ("closed", [change for change in kept if change.fixed_in]),
    ):
        if some:
            lines += ["", f"{kind}:", *(f"  {change.fix_id}: {change.text}" for change in some)]
    if any(change.fixed_in for change in kept):
        lines += ["", "Name the release in the docstring (Upstream:) of what was closed."]
    if by_hand:
        lines += ["", "left to you:", *(f"  {fix_id}: {why}" for fix_id, why in sorted(by_hand.items()))]
    return "\n".join(lines)


def _last(table: Table) -> Cell:
    """The newest set of the table."""
    return max((cell for cell in table.cells if cell.name.startswith("D")), key=lambda cell: cell.name)


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
        lines += [
            "",
            "The row for tests/upstream/cells.toml (`--write` adds it):",
            "",
            *row(installed, table),
        ]
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


def by_itself(fixes: dict[str, Any], pins: Mapping[str, str], folder: Path) -> list[str]:
    """Which fixes are applied in these releases by their code alone, before any claim was extended, and which not.

    Args:
        fixes: of a result.
        pins: the releases.
        folder: where the sources of releases are kept.
    """
    alone = sorted(fix_id for fix_id, said in fixes.items() if said.get("by_itself"))
    others = sorted(fix_id for fix_id, said in fixes.items() if said.get("by_itself") is False)
    if not (alone or others):
        return []
    total = len(alone) + len(others)
    lines = [
        "",
        f"with the claims as they were, by the same code: {len(alone)} of {total} that are still there",
    ]
    lines += textwrap.wrap(
        ", ".join(alone), 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    if not others:
        return lines
    lines += ["", "not, since code changed on which they rely:"]
    lines += [f"  {fix_id}: {_why_not(fixes[fix_id]['said'])}" for fix_id in others]
    recorded = json.loads(proved_code.DATA.read_text(encoding="utf-8"))
    names = list(recorded["pieces"])
    pieces = {
        names[number] for fix_id in others for number in map(int, recorded["targets"].get(fix_id, "").split())
    }
    for library, before in recorded["releases"].items():
        package = PACKAGES.get(library, library)
        mine = sorted(piece for piece in pieces if piece.startswith((f"{package}.", f"{package}:")))
        after = pins.get(library, before)
        if not mine or not before or after == before:
            continue
        old, new = (
            changed_code.Release(f"{library} {release}", sources(library, release, folder))
            for release in (before, after)
        )
        for piece, diff in changed_code.changed(mine, old, new).items():
            lines += ["", f"  {piece}", *(f"    {line}" for line in diff)]
    return lines


def _why_not(reason: str) -> str:
    """Of the reason of a candidate what is not said above it."""
    return reason.partition("; not patched: ")[2].rpartition("; ")[0] or reason


def row(installed: dict[str, str], table: Table) -> list[str]:
    """The lines of a cell with these releases: D and a number, or C if one is older than the newest that is known."""
    taken = {cell.name for cell in table.cells}
    newest = all(Version(installed[name]) >= Version(table.releases[name][-1]) for name in MAIN)
    kind = "D" if newest else "C"
    name = next(f"{kind}{number:02}" for number in range(1, 1000) if f"{kind}{number:02}" not in taken)
    more = [library for library in _last(table).extra if library in installed]
    lines = ["[[cell]]", f'name = "{name}"']
    lines += [f'{library} = "{installed[library]}"' for library in (*MAIN, *more)]
    for library, release in table.shared.items():
        if library == "peft" and installed.get(library, release) != release:
            lines.append(f'{library} = "{installed[library]}"')
    same = [cell.name for cell in table.cells if all(cell.pins[n] == installed[n] for n in MAIN)]
    return [*lines, f"# the same releases as {same[0]}"] if same else lines
