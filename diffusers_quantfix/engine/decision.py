"""Decides about one fix whose target is imported: does the claim fit, is the defect really there; then installs it.

`runner` decides when this is done.
"""

from __future__ import annotations

import importlib
import logging

from . import board as states
from .board import Answer
from .errors import ForeignPatch, TargetMissing, Undecided
from .foreign import foreign_home
from .probe import name_of
from .settings import VARIABLE
from .target import say
from .versions import judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from types import ModuleType

    from .draft import Draft
    from .fix import Fix
    from .ledger import Ledger
    from .versions import Verdict

logger = logging.getLogger(__name__.partition(".")[0])


class LoadedFix:
    """A fix whose file has been read: its declaration, its probe, and its patch function."""

    __slots__ = ("broken", "declaration", "patch")

    def __init__(
        self,
        declaration: Fix,
        broken: Callable[[ModuleType], bool],
        patch: Callable[[ModuleType, Draft], None],
    ) -> None:
        self.declaration = declaration
        self.broken = broken
        self.patch = patch


class Decider:
    """Finds the answer of a fix, and installs it where the answer is "applied".

    Args:
        index: fix id -> (module of the fix file, full name of its target module).
        ledger: what writes.
        newer: called with a fix id: whether the user wants it above its claimed range.
        surroundings: makes the context in which a probe and a patch run.
    """

    def __init__(
        self,
        index: Mapping[str, tuple[str, str]],
        ledger: Ledger,
        newer: Callable[[str], bool],
        surroundings: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._newer = newer
        self._surroundings = surroundings
        self._fixes: dict[str, LoadedFix] = {}
        self._logged: set[str] = set()

    def decide(self, fix_id: str, module: ModuleType) -> Answer:
        """The answer of a fix, for a target that is completely imported.

        A fix that is installed already is checked again: its target may have been executed again.
        """
        answer = self.from_metadata(fix_id)
        if answer is not None:
            return answer
        with self._surroundings():
            return self._decide(fix_id, module)

    def _decide(self, fix_id: str, module: ModuleType) -> Answer:
        fix = self._load(fix_id)
        verdict = judge(fix.declaration.claims)
        try:
            broken = bool(fix.broken(module))
        except Undecided as later:
            if self._ledger.entries(fix_id) and not self._ledger.lost(fix_id):
                return self._applied(fix_id, verdict)
            if not verdict.fits:
                return self.answer(fix_id, states.OUT_OF_RANGE, verdict.reason)
            answer = self.answer(
                fix_id, states.WAITING, f"cannot be decided before {later.needs} is imported"
            )
            answer.needs = later.needs
            return answer
        except TargetMissing as gone:
            if verdict.fits:
                return self.answer(fix_id, states.MISSING, f"nothing to patch here: {gone}")
            return self.answer(fix_id, states.OUT_OF_RANGE, verdict.reason)
        except (Exception, SystemExit) as error:
            if verdict.fits:
                return self.failed(fix_id, f"its probe failed: {say(error)}")
            return self.answer(fix_id, states.OUT_OF_RANGE, verdict.reason)
        if self._ledger.entries(fix_id):
            if broken or self._ledger.lost(fix_id):  # executed again, or replaced by other code
                self._ledger.forget_lost(fix_id)
            if not broken and self._ledger.entries(fix_id):
                return self._applied(fix_id, verdict)
        if not broken:
            return self._sound(fix_id, fix, module, verdict)
        if not verdict.fits and not (verdict.above and self._newer(fix_id)):
            return self._candidate(fix_id, verdict)
        return self._install(fix_id, fix, module, verdict)

    def from_metadata(self, fix_id: str) -> Answer | None:
        """The answer, where it is clear without the target."""
        try:
            verdict = judge(self._load(fix_id).declaration.claims)
        except Exception as error:
            return self.failed(fix_id, f"its own file could not be read: {say(error)}")
        if verdict.kind == "missing":
            return self.answer(fix_id, states.MISSING, verdict.reason)
        if verdict.kind == "unreadable":
            return self.failed(fix_id, verdict.reason, once=verdict.reason)
        return None

    def answer(self, fix_id: str, state: str, reason: str, changes: tuple[str, ...] = ()) -> Answer:
        """An answer with what the fix declares."""
        try:
            said = self._load(fix_id).declaration
        except Exception:  # a fix whose file cannot be read still has its line on the board
            return Answer(fix_id, fix_id, self._index[fix_id][1], {}, (), state, reason, changes)
        return Answer(fix_id, said.title, said.module, said.claims, said.upstream, state, reason, changes)

    def failed(self, fix_id: str, reason: str, once: str = "") -> Answer:
        """A failure is logged once; one of the environment (``once``) only for the first fix that has it."""
        key = once or f"{fix_id} {reason}"
        if key not in self._logged:
            self._logged.add(key)
            logger.warning("%s was not installed: %s", fix_id, reason)
        return self.answer(fix_id, states.FAILED, reason)

    # ------------------------------------------------------------------ helpers

    def _load(self, fix_id: str) -> LoadedFix:
        fix = self._fixes.get(fix_id)
        if fix is None:
            module = importlib.import_module(self._index[fix_id][0])
            fix = self._fixes[fix_id] = LoadedFix(module.FIX, module.broken, module.patch)
        return fix

    def _install(self, fix_id: str, fix: LoadedFix, module: ModuleType, verdict: Verdict) -> Answer:
        draft = self._ledger.draft(fix_id)
        try:
            fix.patch(module, draft)
            self._ledger.commit(draft)
        except TargetMissing as gone:
            return self.answer(fix_id, states.MISSING, f"nothing to patch here: {gone}")
        except ForeignPatch as foreign:
            return self.failed(fix_id, str(foreign))
        except (Exception, SystemExit) as error:
            return self.failed(fix_id, f"could not be installed: {say(error)}")
        try:
            fault = "the defect is still there after patching" if fix.broken(module) else ""
        except (Exception, SystemExit) as error:
            fault = f"its probe failed after patching: {say(error)}"
        if fault:
            refusals = self._ledger.undo(fix_id)
            return self.failed(fix_id, f"{fault}; {'; '.join(refusals) or 'removed again'}")
        answer = self._applied(fix_id, verdict)
        logger.debug("%s %s to %s (%s)", fix_id, answer.state, ", ".join(answer.changes), verdict.reason)
        return answer

    def _applied(self, fix_id: str, verdict: Verdict) -> Answer:
        changes = tuple(dict.fromkeys(entry.where for entry in self._ledger.entries(fix_id)))
        if verdict.fits:
            return self.answer(fix_id, states.APPLIED, f"patched here ({verdict.reason})", changes)
        reason = f"patched here by your choice, although {verdict.reason}; please report whether it works"
        return self.answer(fix_id, states.UNCLAIMED, reason, changes)

    def _sound(self, fix_id: str, fix: LoadedFix, module: ModuleType, verdict: Verdict) -> Answer:
        """The defect is not there: because of upstream's code, or of other code."""
        if not verdict.fits:
            fixed_in = fix.declaration.fixed_in
            fixed = f"; fixed upstream in {fixed_in}" if fixed_in else ""
            return self.answer(fix_id, states.OUT_OF_RANGE, f"{verdict.reason}{fixed}")
        patched_by = self._foreign_code(fix_id, fix, module)
        if patched_by:
            reason = f"the defect does not show in {verdict.reason}: {patched_by}; not touched"
        else:
            reason = f"the defect is not there in {verdict.reason}; not touched"
        return self.answer(fix_id, states.HEALTHY, reason)

    def _foreign_code(self, fix_id: str, fix: LoadedFix, module: ModuleType) -> str:
        """A sentence about foreign code in the slots of the fix; empty where it is the library's own."""
        draft = self._ledger.draft(fix_id)
        try:
            fix.patch(module, draft)  # writes nothing
        except ForeignPatch as foreign:
            return foreign.what
        except (Exception, SystemExit):  # it may assume the defect; the slots named so far are known
            pass
        for entry in draft.entries:
            home = foreign_home(entry.owner, entry.old)
            if home:
                return f"{name_of(entry.owner)}.{entry.name} was replaced by code of {home}"
        return ""

    def _candidate(self, fix_id: str, verdict: Verdict) -> Answer:
        step = f"{VARIABLE}=newer:{fix_id} patches it" if verdict.above else "please report it"
        answer = self.answer(
            fix_id,
            states.CANDIDATE,
            f"the defect seems to be there although {verdict.reason}; not touched; {step}",
        )
        answer.above = verdict.above
        return answer
