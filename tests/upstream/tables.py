"""The tables of the documentation: of the fixes, from their declarations; of the releases, from the results.

python -m tests.upstream.tables --write     # README.md between its markers, diffusers_quantfix/COMPATIBILITY.md
python -m tests.upstream.tables --check     # non-zero exit when one of them is stale
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from .cells import Cell, Table, read
from .environments import cache_folder
from .run_cell import ROOT, declarations, declared_key, result_file
from .verdict import APPLIED, FAILED, HEALTHY, NOT_APPLICABLE, PATCHED

README = ROOT / "README.md"
PAGE = ROOT / "diffusers_quantfix" / "COMPATIBILITY.md"
BEGIN, END = "<!-- fixes:begin -->", "<!-- fixes:end -->"
SIGNS = {PATCHED: "**M**", APPLIED: "A", HEALTHY: "h", NOT_APPLICABLE: "-", FAILED: "FAILED"}
AGAIN = "python -m tests.upstream --cells all --jobs 2 && python -m tests.upstream.tables --write"


class Stale(Exception):
    """A table that does not say what is declared; the message says which and what to do."""


def fixes_table(said: dict[str, dict[str, Any]]) -> str:
    """The README's table: one row per declared fix."""
    lines = ["| fix | what you see | upstream | affected | fixed in |", "| --- | --- | --- | --- | --- |"]
    for fix_id, fix in sorted(said.items()):
        links = ", ".join(f"[{_short(link)}]({link})" for link in fix["upstream"]) or "not reported yet"
        affected = "; ".join(f"{name} {spec or 'any'}" for name, spec in fix["claims"].items())
        row = [
            f"`{fix_id}`",
            fix["symptom"],
            links,
            affected.replace(",", ", "),
            fix["fixed_in"] or "not yet",
        ]
        lines.append("| " + " | ".join(_cell_text(text) for text in row) + " |")
    return "\n".join(lines)


def with_fixes(readme: str, table: str) -> str:
    """The README with this table between its markers.

    Raises:
        Stale: it has no markers.
    """
    if BEGIN not in readme or END not in readme:
        raise Stale(f"README.md has no {BEGIN} ... {END}")
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}"


def stamp(declared: str, table: Table) -> str:
    """The line by which a stale page is known: what was declared, and which cells there were."""
    cells = " ".join(cell.key for cell in table.every)
    return f"<!-- declared {declared} cells {_digest(cells)} -->"


def page(results: dict[str, dict[str, Any]], declared: str, table: Table, ids: list[str]) -> str:
    """The compatibility page.

    Args:
        results: cell name -> its result.
        declared: what `run_cell.declared_key` says now.
        table: the cells.
        ids: the declared fixes.

    Raises:
        Stale: a cell of the CI set has no result for these declarations, or any cell has failures.
    """
    stale = [name for name, result in results.items() if result["declared"] != declared]
    required = [cell.name for cell in table.every if cell.ci]
    for lack, names in (
        ("no result for", [name for name in required if name not in results or name in stale]),
        ("failures in", [n for n, result in results.items() if n not in stale and result["failures"]]),
    ):
        if names:
            raise Stale(f"{lack} {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}; run {AGAIN}")
    results = {name: result for name, result in results.items() if name not in stale}
    dates = sorted(result["date"] for result in results.values())
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    torch = table.torch
    lines = [
        "# Which fix does what on which releases",
        "",
        "Generated from runs of the tests on these releases; do not edit. To make it again:",
        f"`{AGAIN}`.",
        stamp(declared, table),
        "",
        f"Tests ran {when}, Python {table.python}, torch {torch} (CPU, with a stand-in for CUDA devices).",
        "",
        "- **M** patched: without the package the defect shows, with it it does not",
        "- A applied: the defect is there and is patched, but this machine could not show it",
        "- h healthy: the same tests pass without the package; the fix stays away",
        "- \\- not applicable: the library or its class is not in this set, or no test can run there",
        "- ? this set was not run with these fixes",
        "",
        "## Release sets",
        "",
        "| set | diffusers | transformers | accelerate | bitsandbytes | also |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell in table.cells:
        also = ", ".join(f"{name} {cell.pins[name]}" for name in cell.extra)
        pins = [cell.pins[name] for name in ("diffusers", "transformers", "accelerate", "bitsandbytes")]
        lines.append(f"| {cell.name} | {' | '.join(pins)} | {also} |")
    lines += [
        "",
        "## Fixes on release sets",
        "",
        *_grid(ids, table.cells, results, [c.name for c in table.cells]),
    ]
    for library in dict.fromkeys(cell.alone for cell in table.ranges):
        cells = [cell for cell in table.ranges if cell.alone == library]
        ran = [cell for cell in cells if cell.name in results]
        concerned = [fix_id for fix_id in ids if any(fix_id in results[cell.name]["fixes"] for cell in ran)]
        if not ran:
            lines += ["", f"The releases of {library} on their own were not run with these fixes."]
            continue
        lines += ["", f"## Every {library} on its own", "", "For the fixes that need nothing else.", ""]
        lines += _grid(concerned, cells, results, [cell.pins[library] for cell in cells])
    return "\n".join(lines) + "\n"


def _grid(
    ids: list[str], cells: list[Cell], results: dict[str, dict[str, Any]], heads: list[str]
) -> list[str]:
    lines = [f"| fix | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for fix_id in ids:
        signs = [
            SIGNS[results[cell.name]["fixes"].get(fix_id, {}).get("state", NOT_APPLICABLE)]
            if cell.name in results
            else "?"
            for cell in cells
        ]
        lines.append(f"| {fix_id} | {' | '.join(signs)} |")
    return lines


def check_page(text: str, declared: str, table: Table) -> None:
    """Raise `Stale` when the page was made for other declarations or cells."""
    if stamp(declared, table) not in text:
        raise Stale(f"{PAGE.name} was made for other declarations or cells; run {AGAIN}")


def check_readme(readme: str, table: str) -> None:
    """Raise `Stale` when the README's table is not this one."""
    if with_fixes(readme, table) != readme:
        raise Stale("README.md: the table of fixes is stale; run python -m tests.upstream.tables --write")


def _results(folder: Path, table: Table) -> dict[str, dict[str, Any]]:
    found = {}
    for cell in table.every:
        path = result_file(folder, cell)
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["pins"] == cell.pins:
                found[cell.name] = result
    return found


def _short(link: str) -> str:
    """``bitsandbytes#1527`` for a link to an issue."""
    found = re.search(r"([\w.-]+)/(?:issues|pull|discussions)/(\d+)", link)
    return f"{found.group(1)}#{found.group(2)}" if found else link.rstrip("/").rpartition("/")[2]


def _cell_text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _digest(text: str) -> str:
    from .cells import digest

    return digest(text)


def main(arguments: list[str] | None = None) -> int:
    """Write or check both tables; 1 when one is stale."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream.tables", description=__doc__.splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--write", action="store_true", help="write README.md (between its markers) and the page"
    )
    what.add_argument("--check", action="store_true", help="say what is stale")
    parser.add_argument(
        "--folder", type=Path, default=cache_folder(), help="where the driver keeps its results"
    )
    options = parser.parse_args(arguments)
    table, said, declared = read(), declarations(), declared_key()

    def readme() -> None:
        text = README.read_text(encoding="utf-8")
        if options.check:
            check_readme(text, fixes_table(said))
        else:
            README.write_text(with_fixes(text, fixes_table(said)), encoding="utf-8")

    def compatibility() -> None:
        if options.check:
            check_page(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", declared, table)
        else:
            text = page(_results(options.folder, table), declared, table, sorted(said))
            PAGE.write_text(text, encoding="utf-8")

    status = 0
    for job in (readme, compatibility):
        try:
            job()
        except Stale as stale:
            print(f"error: {stale}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
