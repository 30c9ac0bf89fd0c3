"""Asks every fix of a target its three questions, installs it, and writes the answer on the board.

The questions, in order: is it wanted? does the version claim fit? is the defect really there?
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading

from . import board as states
from .board import Answer, Board
from .errors import ForeignPatch, TargetMissing
from .fix import Fix
from .ledger import Ledger
from .target import finished, import_target, is_lazy, is_missing, say
from .versions import installed_version, judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

    from .draft import Draft
    from .settings import Settings

logger = logging.getLogger(__name__.partition(".")[0])

TAKEN_BACK = "taken back by revert(); apply() installs it again"


class LoadedFix:
    """A fix whose file has been read: its declaration, its probe and its patch."""

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


class StrictError(RuntimeError):
    """Raised under ``DIFFUSERS_QUANTFIX=strict`` where a fix that is wanted could not be decided or installed."""


class Runner:
    """The state of this process: which fix was answered how, and what was written.

    Args:
        index: fix id -> (module of the fix file, full name of its target module).
        libraries: the distributions to list as installed.
        settings: called for the user's settings as they are now.
        version: of this package, for the board.
    """

    def __init__(
        self,
        index: Mapping[str, tuple[str, str]],
        libraries: Iterable[str],
        settings: Callable[[], Settings],
        version: str,
    ) -> None:
        self._version = version
        self._index = dict(index)
        self._libraries = tuple(libraries)
        self._settings = settings
        self._ledger = Ledger({target.partition(".")[0] for _, target in index.values()})
        self._fixes: dict[str, LoadedFix] = {}
        self._answers: dict[str, Answer] = {}
        self._order: list[str] = []  # ids in the order of installation
        # Guards the dictionaries for moments only.  It is never held while a fix runs: a fix may import, and
        # whoever waits for our lock may hold that module's import lock.
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._missed: dict[str, str] = {}  # fix id -> its target, which arrived while the fix was busy
        self._announced = False
        self._logged: set[str] = set()
        self._reverted: set[str] = set()
        self._collecting: set[int] = set()  # threads in which status gathers faults, also under strict
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    # ------------------------------------------------------------------ what the watcher and the face call

    def arrived(self, target: str) -> None:
        """A target was executed: run its fixes, and those of targets that came while nobody watched."""
        # The import system still calls the target unfinished: its loader, which called us, has not returned.
        self.run(
            [fix_id for fix_id, (_, its) in self._index.items() if its == target], again=True, ready=target
        )
        self.sweep()

    def sweep(self) -> None:
        """Run every fix that has no final answer yet and whose target is there."""
        self.run(
            [
                fix_id
                for fix_id, (_, target) in self._index.items()
                if self._state(fix_id) in ("", states.WAITING) and finished(target) is not None
            ]
        )

    def run(self, ids: Iterable[str], again: bool = False, ready: str = "") -> None:
        """Answer these fixes as far as their targets are there.

        Args:
            ids: ids of fixes.
            again: ask also those that are applied, since their target may have been executed anew.
            ready: the target that is known to be executed to its end.

        Raises:
            StrictError: under ``strict``, after all of them were asked.
        """
        faults = []
        for fix_id in ids:
            answer = self._run_one(fix_id, again, ready)
            if answer is not None and answer.state == states.FAILED:
                faults.append(f"{fix_id}: {answer.reason}")
        self._announce()
        if faults and self._settings().strict and threading.get_ident() not in self._collecting:
            raise StrictError("; ".join(faults))

    def _run_one(self, fix_id: str, again: bool, ready: str) -> Answer | None:
        """Ask one fix, unless it is being asked: then whoever does that asks once more for us.

        That is another thread, or we came here through an import by the fix itself.
        """
        with self._lock:
            if fix_id in self._busy:
                if ready:
                    self._missed[fix_id] = ready
                return None
            self._busy.add(fix_id)
        answer = None
        for _ in range(3):  # a fix that reloads its own target must not keep us here for ever
            try:
                answer = self._ask(fix_id, again, ready)
            except (Exception, SystemExit) as error:
                answer = self._failed(fix_id, f"could not be decided: {say(error)}")
            except BaseException:
                with self._lock:
                    self._busy.discard(fix_id)
                raise
            if answer is not None:
                self._answers[fix_id] = answer
            with self._lock:
                again, ready = True, self._missed.pop(fix_id, "")
                if not ready:
                    break
        with self._lock:
            self._busy.discard(fix_id)
        return answer

    def apply(self, ids: Iterable[str]) -> None:
        """Ask these fixes anew, those that were reverted too.

        Raises:
            StrictError: under ``strict``, after all of them were asked.
        """
        ids = list(ids)
        self._reverted.difference_update(ids)
        for fix_id in ids:
            if not self._ledger.entries(fix_id):
                self._answers.pop(fix_id, None)
        self.run(ids, again=True)

    def revert(self, ids: Iterable[str]) -> None:
        """Take fixes back, the last one installed first; they stay out until `apply` names them."""
        ids = set(ids)
        self._reverted.update(ids)
        going = [fix_id for fix_id in self._order if fix_id in ids]
        # Fixes that were installed later over the same slot step aside meanwhile.
        aside: list[str] = []
        for fix_id in self._order:
            if fix_id not in ids and any(
                self._order.index(below) < self._order.index(fix_id) and self._ledger.overlap(fix_id, below)
                for below in [*going, *aside]
            ):
                aside.append(fix_id)
        for fix_id in [fix_id for fix_id in reversed(self._order) if fix_id in ids or fix_id in aside]:
            refusals = self._ledger.undo(fix_id)
            if refusals:
                answer = self._answers[fix_id]
                reason = (
                    f"cannot be taken back: {'; '.join(refusals)}; take that away, then call revert() again"
                )
                self._answers[fix_id] = self._answer(fix_id, states.OVERWRITTEN, reason, answer.changes)
                logger.warning("%s %s", fix_id, reason)
            else:
                self._order.remove(fix_id)
                self._answers[fix_id] = self._answer(fix_id, states.DISABLED, TAKEN_BACK)
        self.run(aside, again=True)

    def board(self, loaded: Iterable[str] = ()) -> Board:
        """A snapshot of all answers, after a look whether ours is still in place everywhere."""
        settings = self._settings()
        return Board(
            self._version,
            [self._current(fix_id) for fix_id in self._index],
            {name: installed_version(name) for name in self._libraries},
            settings.to_dict(),
            tuple(loaded),
        )

    def settle(self, load: bool) -> list[str]:
        """Answer what is still open, for a report: a fault becomes an answer, also under ``strict``.

        Args:
            load: import the targets that a final answer needs.

        Returns:
            The full names of the modules that were imported for it.
        """
        loaded: list[str] = []
        self._collecting.add(threading.get_ident())
        try:
            for fix_id, (_, target) in self._index.items() if load else ():
                if self._refusal(fix_id) or self._current(fix_id).state != states.WAITING:
                    continue
                answer = self._known_from_metadata(fix_id)
                if answer is not None:
                    self._answers[fix_id] = answer
                    continue
                was_there = target in sys.modules
                state, reason = import_target(target)
                if state:
                    self._answers[fix_id] = self._answer(fix_id, state, reason)
                elif not was_there:
                    loaded.append(target)
            self.sweep()
        finally:
            self._collecting.discard(threading.get_ident())
        return loaded

    # ------------------------------------------------------------------ one fix

    def _ask(self, fix_id: str, again: bool, ready: str) -> Answer | None:
        """The three questions; None while the target is not there."""
        target = self._index[fix_id][1]
        installed = bool(self._ledger.entries(fix_id))
        if installed and not again:
            return self._current(fix_id)
        refusal = "" if installed else self._refusal(fix_id)
        if refusal:
            return self._answer(fix_id, states.DISABLED, refusal)
        module = sys.modules.get(target) if target == ready else finished(target)
        if module is None:
            return None
        answer = self._known_from_metadata(fix_id)
        if answer is not None:
            return answer
        fix = self._load(fix_id)
        verdict = judge(fix.declaration.claims)
        try:
            broken = bool(fix.broken(module))
        except TargetMissing as gone:
            if verdict.fits:
                return self._answer(fix_id, states.MISSING, f"nothing to patch here: {gone}")
            return self._answer(fix_id, states.OUT_OF_RANGE, verdict.reason)
        except (Exception, SystemExit) as error:
            if verdict.fits:
                return self._failed(fix_id, f"its probe failed: {say(error)}")
            return self._answer(fix_id, states.OUT_OF_RANGE, verdict.reason)
        if installed:
            if broken or self._ledger.lost(fix_id):  # executed anew, or replaced by someone
                self._ledger.forget_lost(fix_id)
            if not broken and self._ledger.entries(fix_id):
                return self._applied(fix_id, verdict.reason)
        if not broken:
            return self._sound(fix_id, verdict.fits, verdict.reason, fix.declaration)
        if not verdict.fits:
            return self._answer(
                fix_id,
                states.CANDIDATE,
                f"the defect seems to be there although {verdict.reason}; nothing was changed; please report it",
            )
        return self._install(fix_id, fix, module, verdict.reason)

    def _known_from_metadata(self, fix_id: str) -> Answer | None:
        """The answer, where it is clear without a look at the target."""
        try:
            verdict = judge(self._load(fix_id).declaration.claims)
        except Exception as error:
            return self._failed(fix_id, f"its own file could not be read: {say(error)}")
        if verdict.kind == "missing":
            return self._answer(fix_id, states.MISSING, verdict.reason)
        if verdict.kind == "unreadable":
            return self._failed(fix_id, verdict.reason, once=verdict.reason)
        return None

    def _install(self, fix_id: str, fix: LoadedFix, module: ModuleType, versions: str) -> Answer:
        draft = self._ledger.draft(fix_id)
        try:
            fix.patch(module, draft)
            self._ledger.commit(draft)
        except TargetMissing as gone:
            return self._answer(fix_id, states.MISSING, f"nothing to patch here: {gone}")
        except ForeignPatch as foreign:
            return self._failed(fix_id, str(foreign))
        except (Exception, SystemExit) as error:
            return self._failed(fix_id, f"could not be installed: {say(error)}")
        with self._lock:
            self._order = [*(other for other in self._order if other != fix_id), fix_id]
        try:
            fault = "the defect is still there after the patch" if fix.broken(module) else ""
        except (Exception, SystemExit) as error:
            fault = f"its probe failed after the patch: {say(error)}"
        if fault:
            refusals = self._ledger.undo(fix_id)
            if not refusals:
                with self._lock:
                    self._order.remove(fix_id)
            return self._failed(fix_id, f"{fault}; {'; '.join(refusals) or 'taken back'}")
        answer = self._applied(fix_id, versions)
        logger.debug("%s applied to %s (%s)", fix_id, ", ".join(answer.changes), versions)
        return answer

    def _applied(self, fix_id: str, versions: str) -> Answer:
        changes = tuple(dict.fromkeys(entry.where for entry in self._ledger.entries(fix_id)))
        return self._answer(fix_id, states.APPLIED, f"patched in {versions}", changes)

    def _sound(self, fix_id: str, claimed: bool, versions: str, declaration: Fix) -> Answer:
        if claimed:
            return self._answer(fix_id, states.HEALTHY, f"the defect is not there in {versions}; left alone")
        fixed = f"; fixed upstream in {declaration.fixed_in}" if declaration.fixed_in else ""
        return self._answer(fix_id, states.OUT_OF_RANGE, f"{versions}{fixed}")

    def _absent(self, fix_id: str, target: str) -> Answer:
        if sys.modules.get(target) is not None and not is_lazy(sys.modules[target]):
            return self._answer(
                fix_id,
                states.WAITING,
                f"{target} is still being imported; apply() or the next target asks again"
                if finished(target) is None
                else f"{target} was imported while nobody watched; apply() asks",
            )
        if is_missing(target.partition(".")[0]):
            return self._answer(fix_id, states.MISSING, f"{target.partition('.')[0]} is not installed")
        return self._answer(fix_id, states.WAITING, f"{target} has not been imported yet")

    # ------------------------------------------------------------------ helpers

    def _refusal(self, fix_id: str) -> str:
        """Why this fix is not wanted, as a sentence; empty when it is."""
        return self._settings().refusal(fix_id) or (TAKEN_BACK if fix_id in self._reverted else "")

    def _state(self, fix_id: str) -> str:
        answer = self._answers.get(fix_id)
        return answer.state if answer is not None else ""

    def _current(self, fix_id: str) -> Answer:
        """The answer as it stands now."""
        answer = self._answers.get(fix_id)
        if answer is None or answer.state == states.WAITING:
            refusal = self._refusal(fix_id)
            if refusal:
                return self._answer(fix_id, states.DISABLED, refusal)
        if answer is None:
            return self._absent(fix_id, self._index[fix_id][1])
        if answer.state == states.APPLIED:
            lost = self._ledger.lost(fix_id)
            if lost:
                reason = f"{'; '.join(lost)}; apply() tries to install it again"
                return self._answer(fix_id, states.OVERWRITTEN, reason, answer.changes)
        return answer

    def _load(self, fix_id: str) -> LoadedFix:
        fix = self._fixes.get(fix_id)
        if fix is None:
            module = importlib.import_module(self._index[fix_id][0])
            fix = self._fixes[fix_id] = LoadedFix(module.FIX, module.broken, module.patch)
        return fix

    def _answer(self, fix_id: str, state: str, reason: str, changes: tuple[str, ...] = ()) -> Answer:
        try:
            said = self._load(fix_id).declaration
        except Exception:  # a fix whose file cannot be read still has its line on the board
            return Answer(fix_id, fix_id, self._index[fix_id][1], {}, (), state, reason, changes)
        return Answer(fix_id, said.title, said.module, said.claims, said.upstream, state, reason, changes)

    def _failed(self, fix_id: str, reason: str, once: str = "") -> Answer:
        """A fault is logged once; one of the environment (``once``) not again for the next fix that meets it."""
        key = once or f"{fix_id} {reason}"
        if key not in self._logged:
            self._logged.add(key)
            logger.warning("%s was not installed: %s", fix_id, reason)
        return self._answer(fix_id, states.FAILED, reason)

    def _announce(self) -> None:
        """One line per process, when something was installed for the first time."""
        with self._lock:
            if self._announced or not self._order:
                return
            self._announced = True
        logger.info(
            "patching %s; `python -m %s status` lists every fix and its reason",
            self._index[self._order[0]][1].partition(".")[0],
            __name__.partition(".")[0],
        )

    def _after_fork(self) -> None:
        """In a forked child: threads that held our lock or were busy with a fix are not there."""
        self._lock = threading.Lock()
        self._busy.clear()
        self._missed.clear()
        self._ledger.after_fork()
