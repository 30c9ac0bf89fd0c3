"""The results of `verify`: a table, or JSON data."""

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
    """One fix: the outcome of its case without the package and with it.

    Attributes:
        verdict: "patched"; "not needed" (the fix does not apply here); "cannot reproduce" (not on this machine); "NOT
            PATCHED" (wrong with the package too, or a bug that seems to exist in a release newer than the claimed
            ones); "NOT REPRODUCED" (the fix applies, but the bug did not show without it); "timed out" (a case did not
            end, which proves nothing about the fix).
        before: the outcome without the package; "" if the case did not run.
        after: the outcome with the package; "" if the case did not run.
        reason: the fix's reason on the board.
        rig: whether the case ran on the fake CUDA devices of the rig.
    """

    def __init__(
        self, id: str, title: str, verdict: str, before: str, after: str, reason: str, rig: bool = False
    ) -> None:
        self.id = id
        self.title = title
        self.verdict = verdict
        self.before = before
        self.after = after
        self.reason = reason
        self.rig = rig

    @property
    def ok(self) -> bool:
        return self.verdict not in (NOT_PATCHED, NOT_REPRODUCED, TIMED_OUT)

    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))

    def __str__(self) -> str:
        where = " (on the rig)" if self.rig else ""
        rows = [f"{self.verdict:<{_COLUMN}}{self.id}{where}", *_indented(self.title, "")]
        if self.before:
            rows += _indented(self.before, "without: ") + _indented(self.after, "with:    ")
        else:
            rows += _indented(self.reason, "-> ")
        return "\n".join(rows)


class Report:
    """All lines, and the installed releases.

    Attributes:
        note: advice about bugs that were not reproduced for want of a device; "" if there are none.
    """

    def __init__(
        self, lines: list[Line], installed: Mapping[str, str | None], seconds: float, note: str = ""
    ) -> None:
        self.lines = lines
        self.installed = dict(installed)
        self.seconds = seconds
        self.note = note

    @property
    def ok(self) -> bool:
        """Whether every applicable bug was reproduced and is patched, and no case timed out."""
        return all(line.ok for line in self.lines)

    def to_dict(self) -> dict[str, object]:
        """The report as JSON data."""
        return {
            "ok": self.ok,
            "installed": self.installed,
            "seconds": round(self.seconds, 1),
            "note": self.note,
            "fixes": [line.to_dict() for line in self.lines],
        }

    def __str__(self) -> str:
        return "\n".join([heading(self.installed), *map(str, self.lines), self.summary()])

    def summary(self) -> str:
        """The number of fixes with each verdict, those that are not as they should be by name, and the note."""
        counts = ", ".join(
            f"{sum(line.verdict == verdict for line in self.lines)} {verdict}"
            for verdict in VERDICTS
            if any(line.verdict == verdict for line in self.lines)
        )
        rows = ["", f"{counts or 'nothing to verify'} ({self.seconds:.0f} s)"]
        for line in self.lines:
            if not line.ok:
                lead = f"{line.verdict:<{_COLUMN}}{line.id}: "
                rows += wrapped(line.after or line.reason, lead, " " * _COLUMN)
        return "\n".join([*rows, *wrapped(self.note)])


def heading(installed: Mapping[str, str | None]) -> str:
    """The first line of the report: the installed releases."""
    present = ", ".join(f"{name} {version}" for name, version in installed.items() if version is not None)
    return "\n".join([*wrapped(f"verified on {present}"), ""])


def _indented(text: str, lead: str) -> list[str]:
    margin = " " * _COLUMN
    return wrapped(text, margin + lead, margin + " " * len(lead))
