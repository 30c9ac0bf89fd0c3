"""Decides when a fix is checked, and keeps its answers.

A fix is checked when its target is imported, or when `apply` names it: first whether the user wants it, and then by
`decision`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading

from . import board as states
from .board import Answer, Board
from .decision import Decider
from .ledger import Ledger
from .target import finished, import_target, is_lazy, is_missing, say
from .versions import installed_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from .settings import Settings

logger = logging.getLogger(__name__.partition(".")[0])

_TURN = 10.0  # seconds

REVERTED = "removed by revert(); apply() installs it again"


class StrictError(RuntimeError):
    """Raised under ``DIFFUSERS_QUANTFIX=strict`` where a fix that is wanted could not be decided or installed."""


class Runner:
    """The state of this process: the answer of every fix, and what was written.

    Args:
        index: fix id -> (module of the fix file, full name of its target module).
        libraries: the distributions to list as installed.
        settings: called for the user's settings as they are now.
        version: of this package, for the board.
        surroundings: makes the context in which a probe and a patch run.
        foundation: the library that imports none of the other patched ones.
    """

    def __init__(
        self,
        index: Mapping[str, tuple[str, str]],
        libraries: Iterable[str],
        settings: Callable[[], Settings],
        version: str,
        surroundings: Callable[[], AbstractContextManager[None]],
        foundation: str = "",
    ) -> None:
        self._version = version
        self._index = dict(index)
        self._libraries = tuple(libraries)
        self._settings = settings
        self._ledger = Ledger(
            {target.partition(".")[0] for _, target in index.values()},
            lambda: settings().options,
            foundation,
        )
        self._decider = Decider(
            self._index, self._ledger, lambda fix_id: settings().wants_newer(fix_id), surroundings
        )
        self._answers: dict[str, Answer] = {}
        # Guards the dictionaries for moments only.  It is never held while a fix runs: a fix may import, and a thread
        # that waits for our lock may hold that module's import lock.
        self._lock = threading.Lock()
        self._turn = threading.RLock()  # of `apply`, `revert` and `settle`, but not while this imports
        self._busy: set[str] = set()
        self._missed: dict[str, str] = {}  # fix id -> its target, which arrived while the fix was busy
        self._announced = False
        self._warned = False
        self._reverted: set[str] = set()
        self._collecting: set[int] = set()  # threads in which status collects errors, also under strict
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    # ------------------------------------------------------------------ what the watcher and the face call

    def arrived(self, target: str) -> None:
        """A target was executed: run its fixes, and those of targets that came before the import hook was active."""
        # The import system still marks the target as unfinished: its loader, which called us, has not returned.
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
        """Decide about these fixes as far as their targets are imported.

        Args:
            ids: ids of fixes.
            again: check also those that are applied, since their target may have been executed again.
            ready: the target that is known to be completely executed.

        Raises:
            StrictError: under ``strict``, after all of them were checked.
        """
        faults = []
        for fix_id in ids:
            answer = self._run_one(fix_id, again, ready)
            if answer is not None and answer.state == states.FAILED:
                faults.append(f"{fix_id}: {answer.reason}")
        self._announce()
        self._warn_of_candidates()
        if faults and self._settings().strict and threading.get_ident() not in self._collecting:
            raise StrictError("; ".join(faults))

    def _run_one(self, fix_id: str, again: bool, ready: str) -> Answer | None:
        """Check one fix, unless it is being checked: then that caller checks it once more for us.

        That is another thread, or we came here through an import by the fix itself.
        """
        ours = False
        try:
            with self._lock:
                if fix_id in self._busy:
                    if ready:
                        self._missed[fix_id] = ready
                    return None
                ours = True
                self._busy.add(fix_id)
            for _ in range(3):  # a fix that reloads its own target must not cause an endless loop
                try:
                    answer = self._ask(fix_id, again, ready)
                except (Exception, SystemExit) as error:
                    answer = self._decider.failed(fix_id, f"could not be decided: {say(error)}")
                if answer is not None:
                    self._answers[fix_id] = answer
                with self._lock:
                    again, ready = True, self._missed.pop(fix_id, "")
                    if not ready:
                        self._busy.discard(fix_id)
                        ours = False
                        break
            return answer
        finally:
            if ours:  # Ctrl-C, anywhere above: the fix must not be busy for ever
                self._busy.discard(fix_id)

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One thread after the other: what one installs must not stand on what another removes.

        Not waited for ever: the other thread may be waiting for an import that this one is in the middle of.
        """
        turn = self._turn
        got = turn.acquire(timeout=_TURN)
        try:
            yield
        finally:
            if got:
                turn.release()

    def apply(self, ids: Iterable[str]) -> None:
        """Check these fixes again, also those that were reverted.

        Raises:
            StrictError: under ``strict``, after all of them were checked.
        """
        ids = list(ids)
        with self._in_turn():
            self._reverted.difference_update(ids)
            for fix_id in ids:
                if not self._ledger.entries(fix_id):
                    self._answers.pop(fix_id, None)
            self.run(ids, again=True)

    def revert(self, ids: Iterable[str]) -> None:
        """Remove fixes, the last one installed first; they stay removed until `apply` names them."""
        with self._in_turn():
            self._remove(set(ids))

    def _remove(self, ids: set[str]) -> None:
        self._reverted.update(ids)
        order = self._ledger.order
        going = [fix_id for fix_id in order if fix_id in ids]
        # Fixes that were installed later over the same slot are removed temporarily.
        aside: list[str] = []
        for fix_id in order:
            if fix_id not in ids and any(
                order.index(below) < order.index(fix_id) and self._ledger.overlap(fix_id, below)
                for below in [*going, *aside]
            ):
                aside.append(fix_id)
        for fix_id in [fix_id for fix_id in reversed(order) if fix_id in ids or fix_id in aside]:
            refusals = self._ledger.undo(fix_id)
            if refusals:
                answer = self._answers[fix_id]
                reason = (
                    f"cannot be removed: {'; '.join(refusals)}; remove that patch, then call revert() again"
                )
                self._answers[fix_id] = self._decider.answer(
                    fix_id, states.OVERWRITTEN, reason, answer.changes
                )
                logger.warning("%s %s", fix_id, reason)
            else:
                self._answers[fix_id] = self._decider.answer(fix_id, states.DISABLED, REVERTED)
        self.run(aside, again=True)

    def board(self, loaded: Iterable[str] = ()) -> Board:
        """A snapshot of all answers, after a check that all patches are still in place."""
        settings = self._settings()
        return Board(
            self._version,
            [self._current(fix_id) for fix_id in self._index],
            {name: installed_version(name) for name in self._libraries},
            settings.to_dict(),
            tuple(loaded),
        )

    def settle(self, load: bool) -> list[str]:
        """Decide what is still open, for a report: an error becomes an answer, also under ``strict``.

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
                answer = self._decider.from_metadata(fix_id)
                if answer is not None:
                    self._answers[fix_id] = answer
                    continue
                was_there = target in sys.modules
                state, reason = import_target(target)
                if state:
                    self._answers[fix_id] = self._decider.answer(fix_id, state, reason)
                elif not was_there:
                    loaded.append(target)
            with self._in_turn():
                self.sweep()
            asked: set[str] = set()
            while load:  # what is there now may lead a probe to the next module that it needs
                answers = list(self._answers.values())  # other threads write to it
                needs = {answer.needs for answer in answers if answer.state == states.WAITING} - asked - {""}
                if not needs:
                    break
                asked |= needs
                faults = {}
                for needed in sorted(needs - sys.modules.keys()):
                    _, faults[needed] = import_target(needed)
                    if not faults[needed]:
                        loaded.append(needed)
                with self._in_turn():
                    self.sweep()
                for answer in list(self._answers.values()):
                    fault = faults.get(answer.needs) if answer.state == states.WAITING else ""
                    if fault:
                        answer.reason = f"{answer.reason.partition(': ')[0]}: {fault}"
        finally:
            self._collecting.discard(threading.get_ident())
        return loaded

    # ------------------------------------------------------------------ one fix

    def _ask(self, fix_id: str, again: bool, ready: str) -> Answer | None:
        """The current answer of one fix; None while its target is not imported."""
        target = self._index[fix_id][1]
        installed = bool(self._ledger.entries(fix_id))
        if installed and not again:
            return self._current(fix_id)
        refusal = "" if installed else self._refusal(fix_id)
        if refusal:
            return self._decider.answer(fix_id, states.DISABLED, refusal)
        module = sys.modules.get(target) if target == ready else finished(target)
        return None if module is None else self._decider.decide(fix_id, module)

    def _absent(self, fix_id: str, target: str) -> Answer:
        if sys.modules.get(target) is not None and not is_lazy(sys.modules[target]):
            return self._decider.answer(
                fix_id,
                states.WAITING,
                f"{target} is still being imported; apply() or the next target asks again"
                if finished(target) is None
                else f"{target} was imported before the import hook was active; call apply()",
            )
        if is_missing(target.partition(".")[0]):
            return self._decider.answer(
                fix_id, states.MISSING, f"{target.partition('.')[0]} is not installed"
            )
        return self._decider.answer(fix_id, states.WAITING, f"{target} has not been imported yet")

    # ------------------------------------------------------------------ helpers

    def _refusal(self, fix_id: str) -> str:
        """Why this fix is not wanted, as a sentence; empty when it is."""
        return self._settings().refusal(fix_id) or (REVERTED if fix_id in self._reverted else "")

    def _state(self, fix_id: str) -> str:
        answer = self._answers.get(fix_id)
        return answer.state if answer is not None else ""

    def _current(self, fix_id: str) -> Answer:
        """The current answer."""
        answer = self._answers.get(fix_id)
        if answer is None or answer.state == states.WAITING:
            refusal = self._refusal(fix_id)
            if refusal:
                return self._decider.answer(fix_id, states.DISABLED, refusal)
        if answer is None:
            return self._absent(fix_id, self._index[fix_id][1])
        if answer.state in (states.APPLIED, states.UNCLAIMED):
            lost = self._ledger.lost(fix_id)
            if lost:
                reason = f"{'; '.join(lost)}; apply() tries to install it again"
                return self._decider.answer(fix_id, states.OVERWRITTEN, reason, answer.changes)
        return answer

    def _announce(self) -> None:
        """One line per process, when something was installed for the first time."""
        with self._lock:
            if self._announced or not self._ledger.order:
                return
            self._announced = True
        logger.info(
            "patching %s; `python -m %s status` lists every fix and its reason",
            self._index[self._ledger.order[0]][1].partition(".")[0],
            __name__.partition(".")[0],
        )

    def _warn_of_candidates(self) -> None:
        """One line per process, when a release that is newer than the claims still seems to have a defect.

        Not while `status` collects answers: it prints the same for all of them.
        """
        if threading.get_ident() in self._collecting:
            return
        answers = list(self._answers.values())
        found = [answer for answer in answers if answer.state == states.CANDIDATE and answer.above]
        with self._lock:
            first = bool(found) and not self._warned
            self._warned = self._warned or first
        if first:
            library = found[0].module.partition(".")[0]
            package = __name__.partition(".")[0]
            logger.warning(
                "the installed %s is newer than this version of %s supports, and a known bug seems to be there (%s), "
                "not patched; DIFFUSERS_QUANTFIX=newer patches it, `python -m %s status` lists all",
                library,
                package,
                found[0].id,
                package,
            )

    def _after_fork(self) -> None:
        """In a forked child: threads that held our lock or were busy with a fix do not exist there."""
        self._lock = threading.Lock()
        self._turn = threading.RLock()
        self._busy.clear()
        self._missed.clear()
        self._ledger.after_fork()
