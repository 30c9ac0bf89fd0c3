"""What `check` found, in machine-readable form: JSON, GitHub Actions annotations, and SARIF 2.1.0."""

from __future__ import annotations

import urllib.parse

from packaging.utils import canonicalize_name

from .findings import AFFECTED
from .harm import MEANING
from .libraries import SELF

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .findings import Finding
    from .pins.reading import Place
    from .upgrades import Upgrade


class Report:
    """Everything that one check found.

    Attributes:
        found: the findings, worst first.
        failing: those that make the check fail.
        upgrades: which releases fix what.
        notes: sentences.
        pins: library -> pin, of the libraries that have advisories.
        places: library -> where it was named first.
        requirements: how many requirements were read.
        ignored: ids that were found and are ignored.
    """

    __slots__ = ("failing", "found", "ignored", "notes", "pins", "places", "requirements", "upgrades")

    def __init__(
        self,
        found: list[Finding],
        failing: list[Finding],
        upgrades: list[Upgrade],
        notes: list[str],
        pins: Mapping[str, str],
        places: Mapping[str, Place],
        requirements: int,
        ignored: list[str],
    ) -> None:
        kinds = list(MEANING)
        self.found = sorted(
            found,
            key=lambda one: (
                kinds.index(one.fix.harm),
                one.patched or one.if_same_code,
                one.verdict != AFFECTED,
                one.fix.id,
                one.id,
            ),
        )
        self.failing = [finding for finding in self.found if finding in failing]
        self.upgrades = upgrades
        self.notes = notes
        self.pins = pins
        self.places = places
        self.requirements = requirements
        self.ignored = ignored

    def place(self, finding: Finding) -> Place | None:
        """Where the first library of a finding was named; None if not in a file."""
        for name in finding.target.claims:
            place = self.places.get(canonicalize_name(name))
            if place is not None:
                return None if place.file == "standard input" else place
        return None

    def level(self, finding: Finding) -> str:
        """The severity of a finding: "error", "warning" (may be affected) or "note" (it does not make the check
        fail)."""
        if finding not in self.failing:
            return "note"
        return "error" if finding.verdict == AFFECTED else "warning"


def remedy(finding: Finding) -> str:
    """What patches or fixes a finding, as part of a sentence."""
    fixed_in = finding.target.fixed_in
    patched = f"not patched: add {SELF}"
    if finding.patched or finding.if_same_code:
        patched = f"patched by {SELF}, which is pinned here"
    if finding.if_same_code:
        patched += ", if the code is the same as in the newest release with the bug that is known"
    return f"{patched}; " + (f"fixed in {fixed_in}" if fixed_in else "fixed by no release yet")


def as_json(report: Report) -> dict[str, Any]:
    """The answer of ``--format json``."""
    return {
        "ok": not report.failing,
        "requirements": report.requirements,
        "pins": dict(report.pins),
        "findings": [
            {**finding.to_dict(), "fails": finding in report.failing, **_location(report.place(finding))}
            for finding in report.found
        ],
        "upgrades": [upgrade.to_dict() for upgrade in report.upgrades],
        "notes": list(report.notes),
        "ignored": list(report.ignored),
    }


def as_github(report: Report) -> list[str]:
    """Workflow commands of GitHub Actions, one a line."""
    lines = []
    for finding in report.found:
        level = {"note": "notice"}.get(report.level(finding), report.level(finding))
        options = {
            key: str(value)
            for key, value in (
                *_location(report.place(finding)).items(),
                ("title", f"{finding.verdict}: {finding.id}"),
            )
            if value is not None
        }
        written = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in options.items())
        sentence = f"{finding.fix.title} ({finding.why}); {remedy(finding)}"
        lines.append(f"::{level} {written}::{_escaped(sentence)}")
    return [*lines, *(f"::notice::{_escaped(note)}" for note in report.notes)]


def as_sarif(report: Report, version: str) -> dict[str, Any]:
    """A log of SARIF 2.1.0 (OASIS), as code scanning takes it."""
    rules = [
        {
            "id": finding.id,
            "shortDescription": {"text": finding.fix.title},
            "fullDescription": {"text": finding.fix.symptom},
            "help": {"text": "\n".join([remedy(finding), *finding.fix.upstream])},
            "properties": {"harm": finding.fix.harm},
        }
        for finding in report.found
    ]
    results = []
    for index, finding in enumerate(report.found):
        result: dict[str, Any] = {
            "ruleId": finding.id,
            "ruleIndex": index,
            "level": report.level(finding),
            "message": {"text": f"{finding.verdict}: {finding.fix.title} ({finding.why}); {remedy(finding)}"},
            "partialFingerprints": {"advisory/v1": finding.id},
        }
        place = report.place(finding)
        # Code scanning rejects the whole log if one result has no file or line.
        file, line = ("not-in-a-file", None) if place is None else (place.file, place.line)
        uri = urllib.parse.quote(file.replace("\\", "/"), errors="surrogatepass")
        physical = {"artifactLocation": {"uri": uri}, "region": {"startLine": line or 1}}
        result["locations"] = [{"physicalLocation": physical}]
        results.append(result)
    notifications = [{"level": "note", "message": {"text": note}} for note in report.notes]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": SELF, "version": version, "rules": rules}},
                "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notifications}],
                "results": results,
            }
        ],
    }


def _location(place: Place | None) -> dict[str, Any]:
    return {} if place is None else {"file": place.file, "line": place.line}


def _escaped(text: str, more: str = "") -> str:
    """As GitHub's toolkit escapes the data of a command, and with ``:,`` its properties."""
    return "".join(f"%{ord(letter):02X}" if letter in f"%\r\n{more}" else letter for letter in text)
