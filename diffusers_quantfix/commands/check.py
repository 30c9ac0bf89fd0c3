"""``check FILE...``: the known bugs of pinned versions, without importing or fetching anything.

It runs in CI on untrusted files: it prints only names, versions and line numbers of known libraries from them, reads no
file outside their project, and always ends with one of three exit codes.
"""

from __future__ import annotations

import json
import sys

from packaging.utils import canonicalize_name

from .. import __version__
from ..activation import target_names
from ..advisories.combinations import of_pins
from ..advisories.findings import AFFECTED, environment_pins, findings, unknown_releases
from ..advisories.formats import Report, as_github, as_json, as_sarif, remedy
from ..advisories.harm import MEANING
from ..advisories.libraries import SELF
from ..advisories.pins import Reading, UnreadableInput, read
from ..advisories.pins.files import FOLLOW, shown
from ..advisories.upgrades import upgrades
from ..fixes.targets import TARGETS
from ..text import wrapped
from .summary import patched_libraries
from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from ..advisories.findings import Finding

EXIT_CODES = (
    f"0 no known bug, or each is patched by the {SELF} that the same files pin (in releases unknown to it, if their "
    "code is the same); 1 a bug is not patched, or with --fail-on any, there is one; 2 an input cannot be read or "
    "contains no requirement, or wrong usage"
)

_MARK = 16
SAME_CODE = "if same code"  # affected, and patched if the code is the same as in the tested releases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="requirements file (with -r, -c), pyproject.toml, uv.lock, poetry.lock, pylock.toml, or - for `pip "
        "freeze` on standard input; several are combined",
    )
    parser.add_argument("--env", action="store_true", help="also check what is installed in this environment")
    parser.add_argument(
        "--format",
        choices=("text", "json", "github", "sarif"),
        default="text",
        help="github: GitHub Actions annotations; sarif: SARIF 2.1.0, for code scanning",
    )
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="the same as --format json"
    )
    parser.add_argument("--explain", action="store_true", help="symptom, versions and links of each bug")
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="in the text format, print only the bugs that make the check fail",
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="ID", help="ignore this bug; repeatable"
    )
    parser.add_argument(
        "--fail-on",
        choices=("unpatched", "any"),
        default="unpatched",
        help=f"any: also fail for bugs that the pinned {SELF} patches",
    )
    parser.add_argument(
        "--require-libraries",
        action="store_true",
        help="exit with 2 if none of the libraries with known bugs is required",
    )
    parser.add_argument(
        FOLLOW,
        action="store_true",
        help="read files that are included from outside the project (the repository) of the given one",
    )


def run(options: argparse.Namespace) -> int:
    """Print the bugs of the pinned versions; the exit code is one of `EXIT_CODES`."""
    if not options.files and not options.env:
        return _refused(options, "name a file to check, - for standard input, or --env")
    try:
        ignored = target_names(tuple(options.ignore)) if options.ignore else []
    except ValueError as error:
        return _refused(options, f"--ignore: {error}")
    called = ", ".join("standard input" if name == "-" else shown(name) for name in options.files)
    try:
        report = examine(options, ignored)
    except UnreadableInput as error:
        return _refused(options, str(error))
    # For untrusted input: a traceback would exit with the code for "affected".
    except Exception as error:
        return _refused(options, f"{called} cannot be read: {type(error).__name__}")
    if not report.requirements:
        return _refused(options, f"{called} contains no requirement: there is nothing to check")
    claimed = patched_libraries(
        canonicalize_name(name) for target in TARGETS.values() for name in target.claims
    )
    absent = not claimed & set(report.pins)
    if absent and options.require_libraries:
        return _refused(options, f"{called} requires none of the libraries: {_listed(claimed)}")
    if options.format == "json":
        print(json.dumps(as_json(report), indent=2))
    elif options.format == "sarif":
        print(json.dumps(as_sarif(report, __version__), indent=2))
    elif options.format == "github":
        _say("\n".join(as_github(report)))
    else:
        head = (
            wrapped(f"none of the libraries is required here: {_listed(claimed)}")
            if absent and not options.quiet
            else []
        )
        _say("\n".join([*head, *_lines(report, options, absent)]))
    return 1 if report.failing else 0


def examine(options: argparse.Namespace, ignored: list[str]) -> Report:
    """The bugs of the inputs.

    Raises:
        UnreadableInput: one of them cannot be read.
    """
    reading = Reading(options.follow_outside)
    if options.env:
        reading.complete = True
        for name, pin in environment_pins().items():
            reading.add(None, name, pin)
            if not pin:
                reading.note(None, f"the version of {name} cannot be read; reinstall it")
    read(options.files, reading)
    pins = reading.pins
    every = findings(pins, reading.required, reading.complete)
    found = [finding for finding in every if finding.id not in ignored]
    return Report(
        found=found,
        failing=[
            finding
            for finding in found
            if options.fail_on == "any" or not (finding.patched or finding.if_same_code)
        ],
        upgrades=upgrades(pins, found, reading.complete),
        notes=[*of_pins(pins), *unknown_releases(pins), *reading.notes],
        pins=pins,
        places=reading.places,
        requirements=reading.count,
        ignored=[finding.id for finding in every if finding.id in ignored],
    )


def _lines(report: Report, options: argparse.Namespace, absent: bool) -> list[str]:
    if options.quiet:
        return [_line(group) for group in _by_fix(report.failing)]
    lines: list[str] = []
    for kind, meaning in MEANING.items():
        group = [finding for finding in report.found if finding.fix.harm == kind]
        if group:
            lines += ["", meaning] if lines else [meaning]
        for of_one_fix in _by_fix(group):
            lines.append(_line(of_one_fix))
            lines += _details(of_one_fix) if options.explain else []
    for title, sentences in (
        ("upgrades", [str(upgrade) for upgrade in report.upgrades]),
        ("notes", report.notes),
        ("ignored", report.ignored),
    ):
        if sentences:
            lines += ["", title]
            for sentence in sentences:
                lines += wrapped(sentence, "  ", "    ")
    if not report.found:
        return lines if absent else ["no known bug in these versions", *lines]
    count = len(_by_fix(report.found))
    open_ = len(_by_fix(one for one in report.found if not (one.patched or one.if_same_code)))
    same = len({one.fix.id for one in report.found if one.if_same_code})
    more = f", {same} patched if the code is the same" if same else ""
    advice = f": add {SELF}" if open_ else ""
    explain = "" if options.explain else " (details: --explain)"
    return [
        *lines,
        "",
        f"{count} known bug{'s' * (count != 1)}{more}, {open_} not patched{advice}{explain}",
    ]


def _by_fix(found: Iterable[Finding]) -> list[list[Finding]]:
    """The findings, grouped by fix."""
    groups: dict[str, list[Finding]] = {}
    for finding in found:
        groups.setdefault(finding.fix.id, []).append(finding)
    return list(groups.values())


def _line(group: list[Finding]) -> str:
    verdicts = {finding.verdict for finding in group}
    if all(finding.patched or finding.if_same_code for finding in group):
        mark = SAME_CODE if any(finding.if_same_code for finding in group) else "patched"
    else:
        mark = AFFECTED if AFFECTED in verdicts else group[0].verdict
    return f"{mark:<{_MARK}}{group[0].fix.id}: {group[0].fix.title}"


def _details(group: list[Finding]) -> list[str]:
    fix = group[0].fix
    lines: list[str] = []
    for finding in group:
        about = f"{finding.id}: " if len(fix.targets) > 1 else ""
        lines += wrapped(f"{about}{finding.why}", " " * _MARK)
        lines += wrapped(remedy(finding), " " * _MARK)
    for link in fix.upstream:
        lines += wrapped(link, " " * _MARK)
    return [*lines, *wrapped(fix.symptom, " " * _MARK + "symptom: ", " " * (_MARK + 2))]


def _listed(libraries: Iterable[str]) -> str:
    return ", ".join(sorted(libraries))


def _say(text: str) -> None:
    """Print; file names that the output cannot encode are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if text:
        show(text.encode(encoding, "backslashreplace").decode(encoding))


def _refused(options: argparse.Namespace, sentence: str) -> int:
    if options.format == "github":
        _say(f"::error::{sentence.replace('%', '%25')}")
    print(f"{SELF}: {sentence}", file=sys.stderr)
    return 2
