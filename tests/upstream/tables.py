"""The generated pages: all fixes, from their declarations; what was seen on which releases, from `results.json`.

python -m tests.upstream.tables --write     # FIXES.md and COMPATIBILITY.md, a line of README.md, fixes/index.py
python -m tests.upstream.tables --check     # non-zero exit when one of them is stale; part of CI
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from diffusers_quantfix.advisories import supported
from tests import index
from tests.peers import results as peers

from .cells import MAIN, Cell, Table, read
from .results import Declarations, Results, Seen, load, valid
from .run_cell import ROOT, declarations
from .verdict import APPLIED, HEALTHY, NOT_APPLICABLE, PATCHED

FIXES = ROOT / "diffusers_quantfix" / "FIXES.md"
COMPATIBILITY = ROOT / "diffusers_quantfix" / "COMPATIBILITY.md"
README = ROOT / "README.md"
SIGNS = {PATCHED: "**P**", APPLIED: "A", HEALTHY: "h", NOT_APPLICABLE: "-"}
UNKNOWN = "?"
WRITE = "python -m tests.upstream.tables --write"


class Stale(Exception):
    """A page that does not say what is declared or was seen; the message says which and what to do."""


def fixes_page(said: Declarations) -> str:
    """The page of all fixes: one row per fix, with a line for each of its targets."""
    lines = [
        "# All fixes",
        "",
        f"Generated from the declarations of the fixes by `{WRITE}`; do not edit.",
        "`python -m diffusers_quantfix explain <id>` prints all about one fix: symptom, cause, what is patched and why",
        "there. The releases on which each one was tested are in COMPATIBILITY.md, next to this file.",
        "",
        "| fix | what you see | upstream | affected | fixed in |",
        "| --- | --- | --- | --- | --- |",
    ]
    by_fix: dict[str, list[str]] = {}
    for name in sorted(said):
        by_fix.setdefault(said[name].get("fix", name), []).append(name)
    for fix_id, names in sorted(by_fix.items()):
        fix = said[names[0]]
        links = ", ".join(f"[{_short(link)}]({link})" for link in fix["upstream"]) or "not reported yet"
        several = names != [fix_id]
        affected = [_affected(said[name]["claims"], f"`{name}`: " if several else "") for name in names]
        fixed = list(dict.fromkeys(said[name]["fixed_in"] or "not yet" for name in names))
        if len(fixed) > 1:
            fixed = [f"`{name}`: {said[name]['fixed_in'] or 'not yet'}" for name in names]
        row = [[f"`{fix_id}`"], [fix["symptom"]], [links], affected, fixed]
        lines.append("| " + " | ".join("<br>".join(map(_cell_text, cell)) for cell in row) + " |")
    return "\n".join(lines) + "\n"


def _affected(claims: Mapping[str, str], lead: str) -> str:
    said = "; ".join(f"{name} {spec or 'any'}" for name, spec in claims.items())
    return lead + said.replace(",", ", ")


def compatibility_page(results: Results, said: Declarations, table: Table, others: peers.Results) -> str:
    """The compatibility page; results that are about other declarations or sets are left out.

    Args:
        results: of `results.json`.
        said: the declarations.
        table: the sets.
        others: the counts of the tests of other libraries, of `tests.peers`.
    """
    results = valid(results, said, table)
    dates = sorted({seen.date for row in results.values() for seen in row.values()})
    when = f" {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ": none yet"
    lines = [
        "# Which fix does what on which releases",
        "",
        "Generated from the results in tests/upstream/results.json; do not edit.",
        "`python -m tests.upstream --cells all --jobs 2 --write` runs the tests on these releases and writes both;",
        "`--fixes ID` runs those of one fix only. `python -m tests.page FILE` writes the same as an HTML page with",
        "filters.",
        "",
        f"Tests ran{when} on Linux, without a GPU: a stand-in for CUDA devices does their work on the CPU.",
        "Nothing ran on Windows, on macOS, on a Python that reads .start files, or on devices of ROCm, XPU, MPS, NPU.",
        "tests/startup/test_elsewhere.py emulates the first three around the package's own code: paths, consoles,",
        "locks, no fork and no multiprocessing; absent compilers are those of the tests of quanto's extensions. The",
        "tests of offloading run with the stand-in under XPU's name, too (tests/rig/accelerator.py).",
        "",
        "- **P** patched: without the package the tests fail with the bug, with it they pass",
        "- A applied: the bug is present and patched, but it cannot be reproduced on the machine that ran the tests",
        "- h healthy: the same tests pass without the package; the fix is not applied",
        "- \\- not applicable: the library or its class is not in this set, or no test can run there",
        f"- {UNKNOWN} not run since the fix was added or its claim changed for this set",
        "",
        "## Release sets",
        "",
        f"| set | Python | torch | {' | '.join(MAIN)} | also |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in table.cells:
        also = ", ".join(f"{name} {cell.pins[name]}" for name in cell.extra)
        releases = [cell.python, *(cell.pins[name] for name in ("torch", *MAIN))]
        lines.append(f"| {cell.name} | {' | '.join(releases)} | {also} |")
    if others:
        lines += [
            "",
            "## Tests of other libraries",
            "",
            "Those of hooks, offloading, loading, quantization, LoRA and merging on the sets",
            f"{', '.join(peers.sets(others))}, without the package and with it, on the CPU and on the stand-in;",
            "`python -m tests.peers --write` runs them.",
            "",
            *peers.lines(others),
        ]
    lines += ["", "## Fixes on release sets", ""]
    lines += _grid(sorted(said), table.cells, results, [cell.name for cell in table.cells], said)
    for library in dict.fromkeys(cell.alone for cell in table.ranges):
        cells = [cell for cell in table.ranges if cell.alone == library]
        alone = [fix_id for fix_id in sorted(said) if set(said[fix_id]["claims"]) == {library}]
        beside = f"Python {table.python} and torch {table.torch}"
        lines += [
            "",
            f"## Every {library} on its own",
            "",
            f"For the fixes that need only {beside} beside it.",
            "",
        ]
        lines += _grid(alone, cells, results, [cell.pins[library] for cell in cells], said)
    return "\n".join(lines) + "\n"


def _grid(
    ids: list[str], cells: list[Cell], results: Results, heads: list[str], said: Declarations
) -> list[str]:
    lines = [f"| fix | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for fix_id in ids:
        row = [_sign(results[fix_id].get(cell.name), said[fix_id]["claims"], cell) for cell in cells]
        lines.append(f"| {fix_id} | {' | '.join(row)} |")
    return lines


def _sign(seen: Seen | None, claims: Mapping[str, str], cell: Cell) -> str:
    """What a cell of a table says; without one of the libraries of a fix there is nothing to run."""
    if seen is None:
        return UNKNOWN if set(claims) <= set(cell.pins) else SIGNS[NOT_APPLICABLE]
    return SIGNS[seen.state]


def readme(text: str) -> str:
    """The README with the paragraph of the supported releases as the package states them."""
    ranges = {name: " to ".join(ends) for name, ends in supported.RELEASES.items() if name != "peft"}
    libraries = ", ".join(f"{name} {ends}" for name, ends in ranges.items())
    torch, python = " to ".join(supported.TORCH), " to ".join(supported.PYTHON)
    said = f"{libraries}; Python 3.10 or newer. Tested with torch {torch} and Python {python}."
    lines = textwrap.fill(said, 120, break_on_hyphens=False)
    return re.sub(rf"(?ms)^{MAIN[0]} \d\S* to \d.*?$(?=\n\n)", lambda found: lines, text, count=1)


def pages(said: Declarations | None = None) -> dict[Path, str]:
    """Every generated page and the index as they should be now."""
    said = declarations() if said is None else said
    return {
        index.INDEX: index.text(),
        FIXES: fixes_page(said),
        COMPATIBILITY: compatibility_page(load(), said, read(), peers.load()),
        README: readme(README.read_text(encoding="utf-8")),
    }


def write() -> None:
    """Write every page."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


def check(path: Path, text: str) -> None:
    """Raise `Stale` when a file is not this text."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        raise Stale(f"{path.name} is stale; run {WRITE}")


def _short(link: str) -> str:
    """``bitsandbytes#1527`` for a link to an issue."""
    found = re.search(r"([\w.-]+)/(?:issues|pull|discussions)/(\d+)", link)
    return f"{found.group(1)}#{found.group(2)}" if found else link.rstrip("/").rpartition("/")[2]


def _cell_text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; 1 when one is stale."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream.tables", description=__doc__.splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the pages")
    what.add_argument("--check", action="store_true", help="report stale pages")
    options = parser.parse_args(arguments)
    if options.write:
        write()
        return 0
    status = 0
    for path, text in pages().items():
        try:
            check(path, text)
        except Stale as stale:
            print(f"error: {stale}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
