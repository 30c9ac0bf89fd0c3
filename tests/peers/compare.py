"""Compares two runs of the same tests, one without the package and one with it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import tomllib

INTENDED = Path(__file__).with_name("intended.toml")


@dataclass
class Run:
    """What became of the tests of one process, or of several in a row.

    Attributes:
        tests: test -> (outcome, type of the error, its text).
        died: the tests during which a process ended.
        whole: whether the last process came to its end.
        board: id of each fix -> its state at the end; empty without the package.
    """

    tests: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    died: list[str] = field(default_factory=list)
    whole: bool = False
    board: dict[str, str] = field(default_factory=dict)

    def read(self, report: Path) -> None:
        """Add the report of one more process."""
        started, self.whole = "", False
        for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
            said = json.loads(line)
            if "start" in said:
                started = said["start"]
            elif "end" in said:
                self.whole, self.board = True, said["board"]
            else:
                started = ""
                self.tests[said["test"]] = (said["outcome"], said["error"], said.get("text", ""))
        if started:
            self.died.append(started)
            self.tests[started] = ("died", "the process ended", "")


@dataclass(frozen=True)
class Intended:
    """A difference that is meant: tests by a pattern, what became of them on either side, and why."""

    tests: str
    without: str
    with_package: str
    reason: str

    def fits(self, test: str, without: str, with_package: str) -> bool:
        return bool(re.search(self.tests, test)) and (self.without, self.with_package) == (
            without,
            with_package,
        )


def intended(path: Path = INTENDED) -> list[Intended]:
    """The list of intended differences.

    Raises:
        ValueError: an entry lacks its reason.
    """
    found = []
    for row in tomllib.loads(path.read_text(encoding="utf-8")).get("difference", ()):
        if not row.get("reason", "").strip():
            raise ValueError(f"{path.name}: the difference of {row['tests']} has no reason")
        found.append(Intended(row["tests"], row["without"], row["with"], row["reason"]))
    return found


@dataclass
class Comparison:
    """What two runs have in common, and where they differ.

    Attributes:
        same: outcome -> how many tests had it on both sides.
        meant: test -> the reason of its intended difference.
        different: test -> a sentence.
    """

    same: dict[str, int] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    different: dict[str, str] = field(default_factory=dict)


def compare(without: Run, with_package: Run, allowed: list[Intended]) -> Comparison:
    """Test by test: the outcome and the type of the error, not its text, in which addresses and paths stand."""
    result = Comparison()
    for test in sorted({*without.tests, *with_package.tests}):
        nothing = ("not run", "", "")
        ours, theirs = with_package.tests.get(test, nothing), without.tests.get(test, nothing)
        if ours[:2] == theirs[:2]:
            result.same[ours[0]] = result.same.get(ours[0], 0) + 1
            continue
        reason = next((one.reason for one in allowed if one.fits(test, theirs[0], ours[0])), "")
        if reason:
            result.meant[test] = reason
        else:
            result.different[test] = f"without: {_say(theirs)}; with: {_say(ours)}"
    return result


def _say(said: tuple[str, str, str]) -> str:
    outcome, error, text = said
    return f"{outcome} ({error}: {text})" if error else outcome
