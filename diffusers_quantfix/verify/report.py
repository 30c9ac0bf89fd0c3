"""The results of `verify`, as a table for people and as data for machines."""

from __future__ import annotations

from ..text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PATCHED = "patched"
NOT_PATCHED = "NOT PATCHED"
NOT_REPRODUCED = "NOT REPRODUCED"
TIMED_OUT = "timed out"
CANNOT_REPRODUCE = "cannot reproduce"
NOT_NEEDED = "not needed"

VERDICTS = (PATCHED, NOT_PATCHED, NOT_REPRODUCED, TIMED_OUT, CANNOT_REPRODUCE, NOT_NEEDED)
_COLUMN = max(map(len, VERDICTS)) + 2


class Line:
    """One fix: what happened without the package and what happened with it.

    Attributes:
        verdict: "patched"; "not needed" (the fix does not apply here); "cannot reproduce" (not on this machine); "NOT
            PATCHED" (wrong with the package too); "NOT REPRODUCED" (the fix applies, but the defect did not occur
            without it); "timed out" (a case did not end, which proves nothing about the fix).
        before: what happened without the package; empty when it was not run.
        after: what happened with it; empty when it was not run.
        reason: the sentence on the board for this fix.
    """

    def __init__(self, id: str, title: str, verdict: str, before: str, after: str, reason: str) -> None:
        self.id = id
        self.title = title
        self.verdict = verdict
        self.before = before
        self.after = after
        self.reason = reason

    @property
    def ok(self) -> bool:
        return self.verdict not in (NOT_PATCHED, NOT_REPRODUCED, TIMED_OUT)

    def to_dict(self) -> dict[str, str]:
        return dict(vars(self))


class Report:
    """All lines, with what is installed."""

    def __init__(self, lines: list[Line], installed: Mapping[str, str | None], seconds: float) -> None:
        self.lines = lines
        self.installed = dict(installed)
        self.seconds = seconds

    @property
    def ok(self) -> bool:
        """Whether every applicable defect was reproduced and is patched, and no case timed out."""
        return all(line.ok for line in self.lines)

    def to_dict(self) -> dict[str, object]:
        """The report for machines."""
        return {
            "ok": self.ok,
            "installed": self.installed,
            "seconds": round(self.seconds, 1),
            "fixes": [line.to_dict() for line in self.lines],
        }

    def __str__(self) -> str:
        present = ", ".join(
            f"{name} {version}" for name, version in self.installed.items() if version is not None
        )
        rows = [*wrapped(f"verified on {present}"), ""]
        for line in self.lines:
            rows.append(f"{line.verdict:<{_COLUMN}}{line.id}")
            rows += _indented(line.title, "")
            if line.before:
                rows += _indented(line.before, "without: ") + _indented(line.after, "with:    ")
            else:
                rows += _indented(line.reason, "-> ")
        counts = ", ".join(
            f"{sum(line.verdict == verdict for line in self.lines)} {verdict}"
            for verdict in VERDICTS
            if any(line.verdict == verdict for line in self.lines)
        )
        return "\n".join([*rows, "", f"{counts or 'nothing to verify'} ({self.seconds:.0f} s)"])


def _indented(text: str, lead: str) -> list[str]:
    margin = " " * _COLUMN
    return wrapped(text, margin + lead, margin + " " * len(lead))
