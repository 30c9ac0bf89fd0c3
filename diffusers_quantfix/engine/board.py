"""The board, with the answer for every fix; read by `status`, the log, the doctor and the tests.

Each target has an answer; the answers of a fix's targets are combined into one.
"""

from __future__ import annotations

import platform

from ..text import wrapped
from .settings import VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

APPLIED = "applied"
UNCLAIMED = "applied (unclaimed release)"
HEALTHY = "healthy"
OUT_OF_RANGE = "out-of-range"
DISABLED = "disabled"
WAITING = "waiting"
MISSING = "missing"
FAILED = "failed"
CANDIDATE = "candidate"
OVERWRITTEN = "overwritten"

STATES = {
    APPLIED: "the bug is present and patched",
    UNCLAIMED: "patched in a release above the claimed range, because the user chose `newer`",
    HEALTHY: "the version is claimed but the bug is not present: fixed upstream, by a fork or a backport",
    OUT_OF_RANGE: "the installed release does not have the bug",
    DISABLED: "switched off by the user",
    WAITING: "the target has not been imported yet",
    MISSING: "the library is not installed, or this release has no such target",
    FAILED: "could not be decided or installed; the library is unchanged",
    CANDIDATE: "the bug seems to be present in a release outside the claimed range; not patched",
    OVERWRITTEN: "other code replaced ours later",
}


# If a fix's targets differ in state, the fix has the first of these.
_FIRST = (
    FAILED,
    OVERWRITTEN,
    CANDIDATE,
    APPLIED,
    UNCLAIMED,
    WAITING,
    HEALTHY,
    DISABLED,
    OUT_OF_RANGE,
    MISSING,
)


class Answer:
    """The state of one fix or of one of its targets, and the reason.

    Attributes:
        id, title, module, claims, upstream: from the declaration; of a target, its own name, module and claims.
        state: one of `STATES`.
        reason: one sentence that a user can act on.
        changes: the dotted names of the slots that were written.
        above: for a candidate: whether the release is newer than the claimed range, where ``newer`` patches it.
        needs: for a target that is waiting although its module is imported: the module that must be imported first.
        same_code: whether it is applied above its claimed range, because the code is the same as where it was proved.
        gone: for a target outside its claim: whether what it patches no longer exists under its name.
        unprobed: whether the probe was not asked, because the release was tested and the claim excludes it.
        targets: for a fix, the answers of its targets; for a target, itself.
    """

    def __init__(
        self,
        id: str,
        title: str,
        module: str,
        claims: Mapping[str, str],
        upstream: tuple[str, ...],
        state: str,
        reason: str,
        changes: tuple[str, ...] = (),
        above: bool = False,
    ) -> None:
        self.id = id
        self.title = title
        self.module = module
        self.claims = dict(claims)
        self.upstream = upstream
        self.state = state
        self.reason = reason
        self.changes = changes
        self.above = above
        self.needs = ""
        self.same_code = False
        self.gone = False
        self.unprobed = False
        self.parts: tuple[Answer, ...] = ()

    @property
    def targets(self) -> tuple[Answer, ...]:
        return self.parts or (self,)

    def lines(self) -> list[str]:
        """The answer as text: state and id, below them the title and the reason, and a line for each target whose
        answer differs; 80 columns."""
        lines = [f"{self.state:<12} {self.id}", *wrapped(self.title, " " * 13)]
        lines += wrapped(self.reason, " " * 13 + "-> ", " " * 16)
        for one in self.parts:
            if (one.state, one.reason) != (self.state, self.reason):
                lines += wrapped(f"{one.id}: {one.state}: {one.reason}", " " * 16, " " * 18)
        return lines

    def to_dict(self) -> dict[str, object]:
        """The answer as data; ``targets`` has a dictionary for each target, with the same keys except those of the fix
        (``title``, ``upstream``)."""
        own = self._facts()
        parts = [one._facts() for one in self.targets]
        return {**own, "title": self.title, "upstream": list(self.upstream), "targets": parts}

    def _facts(self) -> dict[str, object]:
        return {
            "id": self.id,
            "state": self.state,
            "reason": self.reason,
            "module": self.module,
            "claims": dict(self.claims),
            "changes": list(self.changes),
            "above": self.above,
            "same_code": self.same_code,
        }


class Board:
    """A snapshot of every answer, with what is installed and what the user set.

    It prints as a table, and iterates over the `Answer` of each fix, ordered by id. Indexed with a fix's id or a
    target's name, it returns that answer.

    Args:
        version: of this package.
        targets: the answers, one for each target.
        installed: distribution -> its version; None if it is not installed, "" if its version cannot be read.
        settings: the user's, from `Settings.to_dict`.
        loaded: the modules that were imported to answer.
        fixes: target name -> id of its fix; a target that is missing here is a fix of its own.

    Attributes:
        answers: the answers of the fixes.
        targets: those of the targets.
    """

    def __init__(
        self,
        version: str,
        targets: list[Answer],
        installed: Mapping[str, str | None],
        settings: Mapping[str, object],
        loaded: tuple[str, ...] = (),
        fixes: Mapping[str, str] | None = None,
    ) -> None:
        self.quantfix = version
        self.python = platform.python_version()
        self.targets = sorted(targets, key=lambda answer: answer.id)
        of: dict[str, list[Answer]] = {}
        for answer in self.targets:
            of.setdefault((fixes or {}).get(answer.id, answer.id), []).append(answer)
        self.answers = [_together(fix_id, parts) for fix_id, parts in sorted(of.items())]
        self.installed = dict(installed)
        self.settings = dict(settings)
        self.loaded = loaded

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, fix_id: str) -> Answer:
        known = [*self.answers, *self.targets]
        for answer in known:
            if answer.id == fix_id:
                return answer
        from .settings import did_you_mean

        raise KeyError(f"no fix is called {fix_id!r}{did_you_mean(fix_id, [answer.id for answer in known])}")

    @property
    def ok(self) -> bool:
        """Whether no fix needs attention.

        False if one failed, was overwritten, waits for a library that is installed but cannot be imported, or is a
        candidate above its claimed range: a known bug seems to be present in a new release, and is not patched.
        """
        return not any(
            answer.above or answer.state in (FAILED, OVERWRITTEN, WAITING) for answer in self.targets
        )

    @property
    def candidates(self) -> list[Answer]:
        """The fixes whose bug seems to be present in an unclaimed release."""
        return [answer for answer in self if answer.state == CANDIDATE]

    def to_dict(self) -> dict[str, object]:
        """The board as data: keys ``quantfix``, ``python``, ``installed`` (name -> version or None),
        ``settings``, ``loaded`` (the modules that were imported to answer) and ``fixes``."""
        return {
            "quantfix": self.quantfix,
            "python": self.python,
            "installed": dict(self.installed),
            "settings": dict(self.settings),
            "loaded": list(self.loaded),
            "fixes": [answer.to_dict() for answer in self.answers],
        }

    def __str__(self) -> str:
        return _table(self)

    __repr__ = __str__


def _table(board: Board) -> str:
    """The summary, then a line per fix with its state, and below it the reason; 80 columns."""
    lines = [f"diffusers_quantfix {board.quantfix}, Python {board.python}"]
    present = [
        f"{name} {version or '(unreadable version)'}"
        for name, version in board.installed.items()
        if version is not None
    ]
    lines += wrapped("installed: " + (", ".join(present) or "none of the libraries that are patched"))
    problems = board.settings.get("problems")
    for problem in problems if isinstance(problems, list) else ():
        lines += wrapped(f"warning: {problem}")
    if board.loaded:
        lines += wrapped(f"imported to answer: {', '.join(board.loaded)}")
    lines += ["", *summary(board), ""]
    for answer in board:
        lines += answer.lines()
    return "\n".join(lines)


def _together(fix_id: str, targets: list[Answer]) -> Answer:
    """A fix's answer: that of the target with the most significant state, with what was written for all targets."""
    first = min(targets, key=lambda answer: (_FIRST.index(answer.state), not answer.above))
    if len(targets) == 1 and first.id == fix_id:
        return first
    changes = tuple(dict.fromkeys(where for answer in targets for where in answer.changes))
    above = any(answer.above for answer in targets)
    whole = Answer(
        fix_id,
        first.title,
        first.module,
        first.claims,
        first.upstream,
        first.state,
        first.reason,
        changes,
        above,
    )
    whole.needs = first.needs
    whole.same_code = any(answer.same_code for answer in targets)
    whole.parts = tuple(targets)
    return whole


def by_code(board: Board) -> str:
    """How many fixes are applied above their claims, as a phrase; empty if none are."""
    count = sum(answer.same_code for answer in board)
    return f"{count} of them above the claimed range, because the code is the same" if count else ""


def summary(board: Board) -> list[str]:
    """The number of fixes in each state, the ids of those that need attention, and the next step for candidates."""
    by_state: dict[str, list[str]] = {}
    for answer in board:
        by_state.setdefault(answer.state, []).append(answer.id)
    lines = wrapped(", ".join(f"{len(by_state[state])} {state}" for state in STATES if state in by_state))
    lines += wrapped(by_code(board), "  ")
    for state in (FAILED, OVERWRITTEN, CANDIDATE):
        if state in by_state:
            lines += wrapped(f"{state}: {', '.join(by_state[state])}", "", "  ")
    above = [answer for answer in board.candidates if answer.above]
    if above:
        libraries = dict.fromkeys(next(iter(answer.claims), "") for answer in above)
        named = ", ".join(f"{name} {board.installed.get(name) or ''}".strip() for name in libraries)
        lines += wrapped(
            f"{named}: newer than this version of the package supports, and {len(above)} known bug"
            f"{'s seem' if above[1:] else ' seems'} to be present, not patched. Next step: look for a newer package "
            f"release, or set {VARIABLE}=newer to patch all of them, newer:<id> for one",
            "",
            "  ",
        )
    return lines
