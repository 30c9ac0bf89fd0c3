"""``check FILE...``: the known defects of pinned versions, without importing or fetching anything."""

from __future__ import annotations

import json
import sys

from ..advisories.combinations import of_pins
from ..advisories.findings import SELF, environment_pins, findings, unknown_releases, upgrades
from ..advisories.pins import Reading, UnreadableInput, read
from ..text import wrapped
from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ..advisories.findings import Finding, Upgrade

EXIT_CODES = (
    f"0 no known defect, or every one is patched by the {SELF} that the same files pin; 1 a defect is not; "
    "2 an input that cannot be read, or wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="requirements file (with -r, -c), pyproject.toml, uv.lock, poetry.lock, pylock.toml, or - for `pip "
        "freeze` on standard input; several are read as one set",
    )
    parser.add_argument("--env", action="store_true", help="what is installed in this environment, too")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print what the pins have; the exit code is one of `EXIT_CODES`."""
    if not options.files and not options.env:
        print(f"{SELF}: name a file to check, - for standard input, or --env", file=sys.stderr)
        return 2
    reading = Reading()
    if options.env:
        reading.complete = True
        for name, pin in environment_pins().items():
            reading.add(name, pin)
    try:
        read(options.files, reading)
    except UnreadableInput as error:
        print(f"{SELF}: {error}", file=sys.stderr)
        return 2
    pins = reading.pins
    found = findings(pins, reading.required, reading.complete)
    then = upgrades(pins, found, reading.complete)
    notes = [*of_pins(pins), *unknown_releases(pins), *reading.notes]
    open_ = [finding for finding in found if not finding.patched]
    if options.json:
        answer = {
            "ok": not open_,
            "pins": pins,
            "findings": [finding.to_dict() for finding in found],
            "upgrades": [upgrade.to_dict() for upgrade in then],
            "notes": notes,
        }
        print(json.dumps(answer, indent=2))
    else:
        show("\n".join(_lines(found, then, notes)))
    return 1 if open_ else 0


def _lines(found: list[Finding], then: list[Upgrade], notes: list[str]) -> list[str]:
    lines = []
    for finding in found:
        fix = finding.fix
        lines.append(f"{finding.verdict:<16}{fix.id}")
        upgrade = f"fixed in {fix.fixed_in}" if fix.fixed_in else "fixed by no release yet"
        patched = (
            f"patched by {SELF}, which is pinned here" if finding.patched else f"not patched: add {SELF}"
        )
        for text in (fix.title, finding.why, f"{patched}; {upgrade}"):
            lines += wrapped(text, " " * 16)
        lines += wrapped(fix.symptom, " " * 16 + "shows as: ", " " * 18)
    for title, sentences in (("upgrades", [str(upgrade) for upgrade in then]), ("notes", notes)):
        if sentences:
            lines += ["", title]
            for sentence in sentences:
                lines += wrapped(sentence, "  ", "    ")
    if not found:
        return ["no known defect in these versions", *lines]
    open_ = sum(not finding.patched for finding in found)
    return [*lines, "", f"{len(found)} known defect{'s' * (len(found) != 1)}, {open_} not patched"]
