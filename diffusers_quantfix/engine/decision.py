"""Decides about one imported target: does the claim fit, is the bug really present; then installs the fix.

`runner` decides when this is done. A fix's file is imported only if its probe must be asked.
"""

from __future__ import annotations

import importlib
import logging
import sys
from itertools import starmap

from . import board as states
from .board import Answer
from .errors import ForeignPatch, Overtaken, TargetMissing, Undecided
from .fix import declared
from .foreign import foreign_home
from .interruptions import heed_interruption
from .log import log
from .probe import name_of
from .settings import VARIABLE
from .target import say
from .versions import Verdict, contains, installed_version, judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from types import ModuleType

    from .draft import Draft
    from .fix import Fix, Target
    from .ledger import Ledger
    from .proofs import Proofs

_TRIES = 20


class LoadedFix:
    """A fix whose file has been imported: its declaration and its functions ``broken``, ``patch`` and ``in_use``."""

    __slots__ = ("broken", "declaration", "in_use", "patch")

    def __init__(
        self,
        declaration: Fix,
        broken: Callable[[ModuleType], bool],
        patch: Callable[[ModuleType, Draft], None],
        in_use: Callable[[], str] = str,
    ) -> None:
        self.declaration = declaration
        self.broken = broken
        self.patch = patch
        self.in_use = in_use


class Decider:
    """Finds the answer for a target, and installs the fix if the answer is "applied".

    Args:
        targets: name -> target.
        package: the package of the fix files.
        ledger: writes the patches.
        newer: called with a target's name; returns whether the user wants its fix above the claimed range.
        surroundings: makes the context manager in which probes and patches run. It yields a function that is called
            with whether one failed, and says what they cannot be kept from now; empty if there is nothing.
        tested: distribution -> the newest release that all fixes were tested with.
        proofs: the code on which the fixes were proved.
        claimed: returns whether the user wants fixes only where their claims fit.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        package: str,
        ledger: Ledger,
        newer: Callable[[str], bool],
        surroundings: Callable[[], AbstractContextManager[Callable[[bool], str]]],
        tested: Mapping[str, str],
        proofs: Proofs,
        claimed: Callable[[], bool],
    ) -> None:
        self._targets = targets
        self._package = package
        self._ledger = ledger
        self._newer = newer
        self._surroundings = surroundings
        self._tested = tested
        self._proofs = proofs
        self._claimed = claimed
        self._fixes: dict[str, LoadedFix] = {}
        self._logged: set[str] = set()

    def decide(
        self,
        name: str,
        module: ModuleType,
        thorough: bool = False,
        installed: Callable[[str], str | None] = installed_version,
    ) -> Answer:
        """The answer for a completely imported target.

        A target that is already patched is checked again: its module may have been executed again.

        Args:
            name: of the target.
            module: the imported module.
            thorough: ask the probe even if the claim does not fit and the installed release was tested; without it such
                an answer is ``unprobed``.
            installed: returns the version of a distribution.
        """
        verdict, answer = self._from_metadata(name, installed)
        if answer is not None:
            return answer
        if not (thorough or verdict.fits or self._ledger.entries(name) or self._may_patch(name, verdict)):
            answer = self._out_of_range(name, verdict)
            answer.unprobed = True
            return answer
        try:
            fix = self._load(name)
        except Exception as error:
            heed_interruption(error)
            return self.failed(name, f"its own file could not be read: {say(error)}")
        with self._surroundings() as disturbance:
            before = disturbance(False)
            answer = self._decide(name, fix, module, verdict)
            disturbed = before or disturbance(answer.state == states.FAILED)
        if disturbed and answer.state in (states.CANDIDATE, states.HEALTHY, states.FAILED):
            reason = f"cannot be decided while {disturbed}; apply() or the next target asks again"
            return self.answer(name, states.WAITING, reason)
        return self.failed(name, answer.reason) if answer.state == states.FAILED else answer

    def _decide(self, name: str, fix: LoadedFix, module: ModuleType, verdict: Verdict) -> Answer:
        if fix.declaration.asked_once and self._is_installed(name):
            return self._applied(name, verdict)
        try:
            broken = bool(fix.broken(module))
        except Undecided as later:
            if self._is_installed(name):
                return self._applied(name, verdict)
            return self._undecided(name, verdict, later)
        except TargetMissing as gone:
            if verdict.fits:
                return self.answer(name, states.MISSING, f"nothing to patch here: {gone}")
            answer = self._out_of_range(name, verdict)
            answer.gone = self._may_patch(name, verdict)
            return answer
        except (Exception, SystemExit) as error:
            heed_interruption(error)
            if _is_half_imported(error):
                return self._applied(name, verdict) if self._is_installed(name) else self._early(name, error)
            if hidden := _hidden(error):
                return self.answer(name, states.MISSING, f"nothing to patch here: sys.modules hides {hidden}")
            if verdict.fits:
                return self.answer(name, states.FAILED, f"its probe failed: {say(error)}")
            return self._out_of_range(name, verdict)
        executed_again = self._ledger.is_executed_again(name)
        if self._ledger.entries(name) and (broken or self._ledger.lost(name)):
            self._ledger.forget_lost(name)  # executed again, or replaced by other code
        if not broken and not self._ledger.entries(name):
            return self._sound(name, verdict)
        if not broken and not executed_again:  # else the probe has looked at a slot that is still patched
            return self._applied(name, verdict)
        if not verdict.fits and not (verdict.above and self._newer(name)):
            try:
                why_not = self._not_proved(name, verdict)
            except Undecided as later:
                return self._undecided(name, verdict, later)
            if why_not:
                return self._candidate(name, verdict, why_not)
        return self._install(name, fix, module, verdict)

    def _is_installed(self, name: str) -> bool:
        return bool(self._ledger.entries(name) and not self._ledger.lost(name))

    def _undecided(self, name: str, verdict: Verdict, later: Undecided) -> Answer:
        if not (verdict.fits or self._may_patch(name, verdict)):
            return self._out_of_range(name, verdict)
        answer = self.answer(name, states.WAITING, f"cannot be decided before {later.needs} is imported")
        answer.needs = later.needs
        return answer

    def _early(self, name: str, error: BaseException) -> Answer:
        reason = f"cannot be decided before an import has ended ({say(error)}); apply() or the next target asks again"
        return self.answer(name, states.WAITING, reason)

    def _not_proved(self, name: str, verdict: Verdict, thorough: bool = False) -> str:
        """Why a fix is not proved in releases outside its claim, as a phrase; empty if it is, because the code is the
        same.

        ``thorough``, for a report: also say where moved code is now.
        """
        if not verdict.above:
            return "not patched"
        if self._claimed():
            return f"not patched, because of {VARIABLE}=claimed"
        changes = self._proofs.changes(name, verdict.outside, self._targets[name].module)
        if changes is None:
            return "not patched"
        if not changes:
            return ""
        shown = [self._proofs.with_place(phrase) if thorough else phrase for phrase in changes[:2]]
        more = f" and {len(changes) - 2} more" if len(changes) > 2 else ""
        return f"not patched: since {self._proved_on(verdict)} {', '.join(shown)}{more}"

    def _proved_on(self, verdict: Verdict) -> str:
        """The releases on whose code the fixes were proved, for the distributions outside a claim."""
        return ", ".join(f"{name} {self._proofs.release(name)}" for name in verdict.outside)

    def from_metadata(self, name: str) -> Answer | None:
        """The answer, if it is clear without the target's module."""
        return self._from_metadata(name)[1]

    def answer(self, name: str, state: str, reason: str, changes: tuple[str, ...] = ()) -> Answer:
        """An answer for a target; `describe` adds what only the fix's file says."""
        target = self._targets[name]
        return Answer(name, "", target.module, target.claims, (), state, reason, changes)

    def describe(self, answer: Answer) -> Answer:
        """The answer with the fix's title and links, for a report."""
        if answer.gone:
            answer = self._moved(answer) or answer
        try:
            said = declared(self._module(answer.id))
        except Exception as error:  # a fix whose file cannot be read still has its line on the board
            heed_interruption(error)
            answer.title = answer.id
        else:
            answer.title, answer.upstream = said.title, said.upstream
        if answer.state == states.CANDIDATE and answer.above and not answer.gone:
            answer.reason = self._reason_now(answer)
        if answer.state == states.HEALTHY and (verdict := self._from_metadata(answer.id)[0]).fits:
            answer.reason = _reason_of_healthy(verdict, self._foreign_code(answer.id))
        return answer

    def _moved(self, answer: Answer) -> Answer | None:
        """The answer for a target that no longer exists under its name, but whose code exists under another one."""
        try:
            verdict = judge(self._targets[answer.id].claims)
            changes = self._proofs.changes(answer.id, verdict.outside, self._targets[answer.id].module) or ()
            moved = [phrase for phrase in map(self._proofs.with_place, changes) if phrase not in changes]
        except Exception as error:  # a module with some of the code is not imported
            heed_interruption(error)
            return None
        if not moved:
            return None
        why_not = f"not patched: since {self._proved_on(verdict)} {', '.join(moved[:2])}; please report it"
        reason = f"the bug seems to be present although {verdict.reason}; {why_not}"
        found = self.answer(answer.id, states.CANDIDATE, reason)
        found.above = found.gone = True
        return found

    def _reason_now(self, answer: Answer) -> str:
        """The current reason of a candidate: more of its library may have been imported."""
        try:
            verdict = judge(self._targets[answer.id].claims)
            why_not = self._not_proved(answer.id, verdict, thorough=True)
        except Exception as error:
            heed_interruption(error)
            return answer.reason
        return self._candidate(answer.id, verdict, why_not).reason if why_not else answer.reason

    def in_use(self, name: str, asked: dict[Callable[[], str], str]) -> str:
        """Why an installed fix must not be removed now, as a sentence; empty if it may be.

        Args:
            name: of the target.
            asked: the answers at this moment: several fixes ask one function, which looks at all objects.
        """
        try:
            if not self._ledger.entries(name):
                return ""
            ask = self._load(name).in_use
            if ask not in asked:
                asked[ask] = ask()
            return asked[ask]
        except Exception as error:
            heed_interruption(error)
            return ""

    def failed(self, name: str, reason: str, once: str = "") -> Answer:
        """A failure is logged once; a fault of the environment (``once``) only for the first fix that meets it."""
        key = once or f"{name} {reason}"
        if key not in self._logged:
            self._logged.add(key)
            log(logging.WARNING, "%s was not installed: %s", name, reason)
        return self.answer(name, states.FAILED, reason)

    # ------------------------------------------------------------------ helpers

    def _from_metadata(
        self, name: str, installed: Callable[[str], str | None] = installed_version
    ) -> tuple[Verdict, Answer | None]:
        try:
            verdict = judge(self._targets[name].claims, installed)
        except Exception as error:
            heed_interruption(error)
            verdict = Verdict("unreadable", f"its claim cannot be read: {say(error)}")
        if verdict.kind == "missing":
            return verdict, self.answer(name, states.MISSING, verdict.reason)
        if verdict.kind == "unreadable":
            return verdict, self.failed(name, verdict.reason, once=verdict.reason)
        return verdict, None

    def _load(self, name: str) -> LoadedFix:
        file = self._targets[name].file
        fix = self._fixes.get(file)
        if fix is None:
            module = self._module(name)
            fix = self._fixes[file] = LoadedFix(
                module.FIX, module.broken, module.patch, getattr(module, "in_use", str)
            )
        return fix

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self._package}.{self._targets[name].file}")

    def _may_patch(self, name: str, verdict: Verdict) -> bool:
        """Whether a target outside its claim may need a patch, or a warning, in this process.

        That is a release above the claim: the user may want it patched (``newer``), and a release that this package was
        not tested with may still have the bug, or have it again. The tested releases outside the claim do not have it.
        """
        return verdict.above and (self._newer(name) or any(starmap(self._untested, verdict.outside.items())))

    def _untested(self, distribution: str, version: str) -> bool:
        newest = self._tested.get(distribution)
        return newest is None or not contains(f"<={newest}", version)

    def _install(self, name: str, fix: LoadedFix, module: ModuleType, verdict: Verdict) -> Answer:
        try:
            self._write(name, fix, module)
        except TargetMissing as gone:
            return self.answer(name, states.MISSING, f"nothing to patch here: {gone}")
        except ForeignPatch as foreign:
            return self.answer(name, states.FAILED, str(foreign))
        except (Exception, SystemExit) as error:
            heed_interruption(error)
            if _is_half_imported(error):
                return self._early(name, error)
            return self.answer(name, states.FAILED, f"could not be installed: {say(error)}")
        try:
            still = not fix.declaration.asked_once and fix.broken(module)
            fault = "the bug is still present after patching" if still else ""
        except (Exception, SystemExit) as error:
            heed_interruption(error)
            fault = f"its probe failed after patching: {say(error)}"
        if fault:
            refusals = self._ledger.undo(name)
            return self.answer(name, states.FAILED, f"{fault}; {'; '.join(refusals) or 'removed again'}")
        answer = self._applied(name, verdict)
        log(logging.DEBUG, "%s %s to %s (%s)", name, answer.state, ", ".join(answer.changes), verdict.reason)
        return answer

    def _write(self, name: str, fix: LoadedFix, module: ModuleType) -> None:
        for tries in range(_TRIES, 0, -1):
            draft = self._ledger.draft(name)
            fix.patch(module, draft)
            try:
                self._ledger.commit(draft)
                return
            except Overtaken:
                if tries == 1:
                    raise

    def _applied(self, name: str, verdict: Verdict) -> Answer:
        changes = tuple(dict.fromkeys(entry.where for entry in self._ledger.entries(name)))
        if verdict.fits:
            return self.answer(name, states.APPLIED, f"patched here ({verdict.reason})", changes)
        if not (verdict.above and self._newer(name)):
            reason = (
                f"patched here ({verdict.reason}, but the code is the same as in {self._proved_on(verdict)})"
            )
            answer = self.answer(name, states.APPLIED, reason, changes)
            answer.same_code = True
            return answer
        reason = f"patched here by your choice, although {verdict.reason}; please report whether it works"
        return self.answer(name, states.UNCLAIMED, reason, changes)

    def _out_of_range(self, name: str, verdict: Verdict) -> Answer:
        fixed_in = self._targets[name].fixed_in
        fixed = f"; fixed upstream in {fixed_in}" if fixed_in else ""
        return self.answer(name, states.OUT_OF_RANGE, f"{verdict.reason}{fixed}")

    def _sound(self, name: str, verdict: Verdict) -> Answer:
        """The bug is not present: because of upstream's code, or of other code, which `describe` looks for."""
        if not verdict.fits:
            return self._out_of_range(name, verdict)
        return self.answer(name, states.HEALTHY, _reason_of_healthy(verdict))

    def _foreign_code(self, name: str) -> str:
        """A sentence about foreign code in the fix's slots; empty if all of it is the library's own."""
        draft = self._ledger.draft(name)
        try:
            with self._surroundings():
                self._load(name).patch(sys.modules[self._targets[name].module], draft)  # writes nothing
        except ForeignPatch as foreign:
            return foreign.what
        except (Exception, SystemExit) as error:  # it may assume the bug; the slots named so far are known
            heed_interruption(error)
        for entry in draft.entries:
            home = foreign_home(entry.owner, entry.old)
            if home:
                return f"{name_of(entry.owner)}.{entry.name} was replaced by code of {home}"
        return ""

    def _candidate(self, name: str, verdict: Verdict, why_not: str) -> Answer:
        step = f"{VARIABLE}=newer:{name} patches it" if verdict.above else "please report it"
        answer = self.answer(
            name,
            states.CANDIDATE,
            f"the bug seems to be present although {verdict.reason}; {why_not}; {step}",
        )
        answer.above = verdict.above
        return answer


def _reason_of_healthy(verdict: Verdict, patched_by: str = "") -> str:
    """Why a target is not patched whose bug is not present: ``patched_by`` is a sentence about other code there."""
    return f"the bug is not present in {verdict.reason}{patched_by and f': {patched_by}'}; not patched"


def _is_half_imported(error: BaseException) -> bool:
    """Whether a module was missing something because another thread, or a caller, is still importing it.

    It is an AttributeError or ImportError, or a RuntimeError of diffusers' and transformers' lazy modules.
    """
    return "partially initialized module" in str(error)


def _hidden(error: BaseException) -> str:
    """The library that could not be imported because the program has put None in its place in `sys.modules`."""
    library = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    return library if library in sys.modules and sys.modules[library] is None else ""
