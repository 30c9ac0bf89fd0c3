"""The one place where every fix's answer is written; `status`, the log, the doctor and the tests read it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

APPLIED = "applied"
HEALTHY = "healthy"
OUT_OF_RANGE = "out-of-range"
DISABLED = "disabled"
WAITING = "waiting"
MISSING = "missing"
FAILED = "failed"
CANDIDATE = "candidate"
OVERWRITTEN = "overwritten"

STATES = {
    APPLIED: "the defect is there and mended",
    HEALTHY: "the version is claimed but the defect is not there: mended upstream, by a fork or a backport",
    OUT_OF_RANGE: "the installed release does not have the defect",
    DISABLED: "switched off by the user",
    WAITING: "the target has not been imported yet",
    MISSING: "the library is not installed, or this release has no such target",
    FAILED: "could not be decided or installed; the library is as it was",
    CANDIDATE: "the defect seems to be there in a release that no one has claimed; not touched",
    OVERWRITTEN: "someone replaced our code later",
}


class Answer:
    """What became of one fix.

    Attributes:
        id, title, module, claims, upstream: from its declaration.
        state: one of `STATES`.
        reason: one sentence a person can act on.
        changes: the dotted names of the slots that were written.
    """

    __slots__ = ("changes", "claims", "id", "module", "reason", "state", "title", "upstream")

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
    ) -> None:
        self.id = id
        self.title = title
        self.module = module
        self.claims = dict(claims)
        self.upstream = upstream
        self.state = state
        self.reason = reason
        self.changes = changes

    def to_dict(self) -> dict[str, object]:
        """The answer for machines."""
        return {
            "id": self.id,
            "title": self.title,
            "state": self.state,
            "reason": self.reason,
            "module": self.module,
            "claims": dict(self.claims),
            "upstream": list(self.upstream),
            "changes": list(self.changes),
        }


class Board:
    """A snapshot of every answer, with what is installed and what the user set.

    It prints as a table, and iterates over its `Answer` objects in the order of their ids.
    """

    def __init__(
        self,
        answers: list[Answer],
        installed: Mapping[str, str | None],
        settings: Mapping[str, object],
        loaded: tuple[str, ...] = (),
    ) -> None:
        import platform

        from .. import __version__

        self.quantfix = __version__
        self.python = platform.python_version()
        self.answers = sorted(answers, key=lambda answer: answer.id)
        self.installed = dict(installed)
        self.settings = dict(settings)
        self.loaded = loaded

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, fix_id: str) -> Answer:
        for answer in self.answers:
            if answer.id == fix_id:
                return answer
        from .settings import did_you_mean

        raise KeyError(f"no fix is called {fix_id!r}{did_you_mean(fix_id, [answer.id for answer in self])}")

    @property
    def ok(self) -> bool:
        """Whether every fix that may be needed here has a good answer.

        False when one failed, was overwritten, or waits for a library that is installed and cannot be imported.
        """
        return not any(answer.state in (FAILED, OVERWRITTEN, WAITING) for answer in self)

    def to_dict(self) -> dict[str, object]:
        """The board for machines: keys ``quantfix``, ``python``, ``installed`` (name -> version or None),
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
        from .table import board_table

        return board_table(self)

    __repr__ = __str__
