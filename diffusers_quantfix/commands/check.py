"""``check FILE...``: the known defects of pinned versions, without importing or fetching anything.

Exit codes: 0 no defect, or every one is mended by the diffusers-quantfix that the same files name; 1 a defect that
nothing mends; 2 an input that cannot be read.
"""

from __future__ import annotations

import json
import sys
import textwrap

from ..advisories import SELF, by_release, environment_pins, findings
from ..pins import UnreadableInput, read_pins

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ..advisories import Finding

WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="requirements file, pyproject.toml, uv.lock, poetry.lock, or - for `pip freeze` on standard input",
    )
    parser.add_argument("--env", action="store_true", help="this environment, too")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    if not options.files and not options.env:
        print("diffusers-quantfix: name a file to check, - for standard input, or --env", file=sys.stderr)
        return 2
    pins: dict[str, str] = environment_pins() if options.env else {}
    try:
        for file in options.files:
            pins.update(read_pins(file))
    except UnreadableInput as error:
        print(f"diffusers-quantfix: {error}", file=sys.stderr)
        return 2
    found = findings(pins)
    open_ = [finding for finding in found if not finding.mended]
    if options.json:
        print(json.dumps({"ok": not open_, "pins": pins, "findings": [f.to_dict() for f in found]}, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 1 if open_ else 0


def _lines(found: list[Finding]) -> list[str]:
    if not found:
        return ["no known defect in these versions"]
    lines = []
    for finding in found:
        fix = finding.fix
        lines.append(f"{finding.verdict:<16}{fix.id}")
        mended = f"mended by {SELF}, which is named here" if finding.mended else f"mended by {SELF}: add it"
        upgrade = (
            f"upstream heals it in {fix.healed}" if fix.healed else "no release of upstream heals it yet"
        )
        for text in (fix.title, fix.symptom, finding.why, f"{mended}; {upgrade}"):
            lines += _indented(text)
    for release, ids in by_release(found).items():
        lines += textwrap.wrap(f"upgrade to {release}: retires {', '.join(ids)}", WIDTH)
    open_ = sum(not finding.mended for finding in found)
    return [*lines, "", f"{len(found)} known defects, {open_} not mended"]


def _indented(text: str) -> list[str]:
    margin = " " * 16
    return textwrap.wrap(text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
