"""Decides when targets are checked, and keeps the answers.

A target is checked when its module is imported, or when `apply` names it: first whether the user wants it patched, then
by `decision`. A ``name`` here is a target's name; the board groups the targets of one fix.
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
from .interruptions import heed_interruption
from .ledger import Ledger
from .locks import Lock
from .log import log
from .proofs import Proofs
from .target import finished, import_target, is_lazy, is_missing, is_stand_in, say
from .versions import Installed, installed_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from .fix import Target
    from .settings import Settings


_TURN = 10.0  # seconds

REVERTED = "removed by revert(); apply() installs it again"


class StrictError(RuntimeError):
    """Raised under ``DIFFUSERS_QUANTFIX=strict`` if a wanted fix could not be decided or installed."""


class Runner:
    """The state of this process: the answer of every fix, and what was written.

    Args:
        targets: name -> target.
        package: the package of the fix files.
        libraries: the distributions to list as installed.
        settings: returns the user's current settings.
        version: of this package, for the board.
        surroundings: makes the context manager in which probes and patches run. It yields a function that says what
            they cannot be kept from now; empty if there is nothing.
        foundation: the library that imports none of the other patched ones.
        tops: the libraries that none of the other patched ones imports from.
        tested: distribution -> the newest release that all fixes were tested with.
        proofs: path of the data file of `proofs`.
        packages: distribution -> its package, where they have different names.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        package: str,
        libraries: Iterable[str],
        settings: Callable[[], Settings],
        version: str,
        surroundings: Callable[[], AbstractContextManager[Callable[[bool], str]]],
        foundation: str = "",
        tops: Iterable[str] = (),
        tested: Mapping[str, str] | None = None,
        proofs: str = "",
        packages: Mapping[str, str] | None = None,
    ) -> None:
        self._version = version
        self._targets = dict(targets)
        self._by_module: dict[str, list[str]] = {}  # full name of a module -> its targets
        for name, target in targets.items():
            self._by_module.setdefault(target.module, []).append(name)
        self._libraries = tuple(libraries)
        self._settings = settings
        self._ledger = Ledger(
            {target.module.partition(".")[0] for target in targets.values()},
            lambda: settings().options,
            foundation,
            tops,
        )
        self._decider = Decider(
            self._targets,
            package,
            self._ledger,
            lambda name: settings().wants_newer(name),
            surroundings,
            tested or {},
            Proofs(proofs, packages or {}, self._ledger.below),
            lambda: settings().claimed,
        )
        self._answers: dict[str, Answer] = {}
        # Guards the dictionaries, and is held only briefly.  Never while a fix runs: a fix may import, and a thread
        # that waits for our lock may hold that module's import lock.
        self._lock = threading.Lock()
        self._turn = Lock()  # of `apply`, `revert` and `settle`, except while `settle` imports
        self._busy: set[str] = set()
        self._missed: dict[str, str] = {}  # name -> its module, which arrived while the target was busy
        self._announced = False
        self._warned = False
        self._reverted: dict[str, str] = {}  # name -> why
        self._collecting: set[int] = set()  # threads in which status collects errors, also under strict
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    # ------------------------------------------------------------------ what the watcher and the public API call

    def arrived(self, module: str) -> None:
        """A module was executed: check its targets, those imported before the import hook was active, and, if it was
        executed before, those that had patched it then."""
        names = dict.fromkeys((*self._ledger.lost_in(module), *self._by_module.get(module, ())))
        # The import system still marks the module as unfinished: its loader, which called us, has not returned.
        installed = Installed()
        self.check(names, again=True, ready=module, installed=installed)
        self.check_imported(installed=installed)

    def check_imported(self, thorough: bool = False, installed: Installed | None = None) -> None:
        """Check every target that has no final answer yet and whose module is imported.

        Args:
            thorough: for a report: also those whose probe is not asked during imports.
            installed: see `check`.
        """
        known = self._answers
        self.check(
            [
                name
                for module, names in self._by_module.items()
                if module in sys.modules
                for name in names
                # Without a call for each: most have their answers, and this is asked at every arrival.
                if (answer := known.get(name)) is None
                or answer.state == states.WAITING
                or (thorough and self._is_open(name, thorough))
                if finished(module) is not None
            ],
            thorough=thorough,
            installed=installed,
        )

    def check(
        self,
        names: Iterable[str],
        again: bool = False,
        ready: str = "",
        thorough: bool = False,
        installed: Installed | None = None,
    ) -> None:
        """Decide about those of these targets whose modules are imported, and keep the answers.

        Args:
            names: of targets.
            again: also check applied ones, since their module may have been executed again.
            ready: the module that is known to be completely executed.
            thorough: ask every probe, see `Decider.decide`.
            installed: the installed releases, if they were asked for a moment ago.

        Raises:
            StrictError: under ``strict``, after all of them have been checked.
        """
        installed = installed or Installed()
        checked = (self._check_one(name, again, ready, thorough, installed) for name in names)
        answers = [answer for answer in checked if answer]
        self._announce()
        self._warn_of_candidates(answers)
        faults = [f"{answer.id}: {answer.reason}" for answer in answers if answer.state == states.FAILED]
        if faults and self._settings().strict and threading.get_ident() not in self._collecting:
            raise StrictError("; ".join(faults))

    def _check_one(
        self, name: str, again: bool, ready: str, thorough: bool, installed: Installed
    ) -> Answer | None:
        """Check one target.  If it is already being checked, that caller checks it once more for us.

        That caller is another thread, or this one, if the fix itself imported something.
        """
        ours = False
        try:
            with self._lock:
                if name in self._busy:
                    if ready:
                        self._missed[name] = ready
                    return None
                ours = True
                self._busy.add(name)
            for _ in range(3):  # a fix that reloads its own target must not cause an endless loop
                try:
                    answer = self._answer_now(name, again, ready, thorough, installed)
                except (Exception, SystemExit) as error:
                    heed_interruption(error)
                    answer = self._decider.failed(name, f"could not be decided: {say(error)}")
                if answer is not None:
                    self._answers[name] = answer
                with self._lock:
                    again, ready = True, self._missed.pop(name, "")
                    if not ready:
                        self._busy.discard(name)
                        ours = False
                        break
            return answer
        finally:
            if ours:  # Ctrl-C, anywhere above: it must not stay marked busy
                self._busy.discard(name)

    def _in_turn(self, work: Callable[[], None]) -> None:
        """One thread at a time: what one installs must not build on what another removes.

        The wait is limited: the other thread may be waiting for an import that this one is in the middle of.
        """
        self._turn.run(lambda taken: work(), within=_TURN)

    def apply(self, names: Iterable[str]) -> None:
        """Check these targets again, including reverted ones.

        Raises:
            StrictError: under ``strict``, after all of them have been checked.
        """
        names = list(names)

        def work() -> None:
            self._ledger.recover()
            for name in names:
                self._reverted.pop(name, None)
                if not self._ledger.entries(name):
                    self._answers.pop(name, None)
            self.check(names, again=True, thorough=True)

        self._in_turn(work)

    def revert(self, names: Iterable[str], why: str = REVERTED) -> None:
        """Remove patches, the last installed first; they stay removed until `apply` names them."""

        def work() -> None:
            self._ledger.recover()
            self._remove(set(names), why)

        self._in_turn(work)

    def _remove(self, names: set[str], why_not: str) -> None:
        used = self._needed(names)
        names -= used.keys()
        self._reverted.update(dict.fromkeys(names, why_not))
        order = self._ledger.order
        going = [name for name in order if name in names]
        # Patches that were installed later over the same slot are removed temporarily.
        aside: list[str] = []
        for name in order:
            if name not in names and any(
                order.index(below) < order.index(name) and self._ledger.overlap(name, below)
                for below in [*going, *aside]
            ):
                aside.append(name)
        left = [name for name in reversed(order) if name in names or name in aside]
        try:
            refused = self._undo(left, why_not)
        except BaseException:  # Ctrl-C
            with contextlib.suppress(StrictError):
                self.check(aside, again=True)
            raise
        for name, refusals in refused.items():
            answer = self._answers[name]
            reason = f"cannot be removed: {'; '.join(refusals)}; remove that patch, then call revert() again"
            self._answers[name] = self._decider.answer(name, states.OVERWRITTEN, reason, answer.changes)
            log(logging.WARNING, "%s %s", name, reason)
        aside = [name for name in aside if name not in refused]
        self.check(aside, again=True)
        for name, why in used.items():
            self._answers[name].reason = f"not removed by revert(): {why}"

    def _undo(self, left: list[str], why: str) -> dict[str, list[str]]:
        """Remove these from the ledger; returns those that cannot be removed, with the reasons."""
        refused: dict[str, list[str]] = {}
        while left:
            refused = {name: refusals for name in left if (refusals := self._ledger.undo(name))}
            for name in left:
                if name not in refused:
                    self._answers[name] = self._decider.answer(name, states.DISABLED, why)
            if len(refused) == len(left):
                break
            left = list(refused)  # once more: what was installed again may lie below an older patch
        return refused

    def _needed(self, names: set[str]) -> dict[str, str]:
        """Which of ``names`` live models need, and why.

        Also what lies below such a one, which would have to be removed and installed again: another thread may be
        running the model.
        """
        needed: dict[str, str] = {}
        asked: dict[Callable[[], str], str] = {}
        above: dict[str, str] = {}  # as ``needed``, with those that are not in ``names``
        for name in reversed(self._ledger.order):
            over = next((one for one in above if self._ledger.overlap(one, name)), "")
            if name in names:
                why = self._decider.in_use(name, asked) or (
                    over and f"{over} is installed over it; {above[over]}"
                )
            elif any(self._ledger.overlap(name, one) for one in names):
                why = self._decider.in_use(name, asked)
            else:
                continue
            if why:
                above[name] = why
                if name in names:
                    needed[name] = why
        return needed

    def board(self, loaded: Iterable[str] = ()) -> Board:
        """A snapshot of all answers, after checking that all patches are still in place."""
        settings = self._settings()
        return Board(
            self._version,
            [self._decider.describe(self._current_answer(name)) for name in self._targets],
            {name: installed_version(name) for name in self._libraries},
            settings.to_dict(),
            tuple(loaded),
            {name: target.fix for name, target in self._targets.items()},
        )

    def settle(self, load: bool) -> list[str]:
        """Decide what is still open, for a report: errors become answers, even under ``strict``.

        Args:
            load: import the targets that a final answer needs.

        Returns:
            The full names of the modules that this imported.
        """
        loaded: list[str] = []
        try:
            self._collecting.add(threading.get_ident())
            for name, target in self._targets.items() if load else ():
                if self._refusal(name) or self._current_answer(name).state != states.WAITING:
                    continue
                answer = self._decider.from_metadata(name)
                if answer is not None:
                    self._answers[name] = answer
                    continue
                was_there = target.module in sys.modules
                state, reason = import_target(target.module)
                if state:
                    self._answers[name] = self._decider.answer(name, state, reason)
                elif not was_there:
                    loaded.append(target.module)
            self._in_turn(lambda: self.check_imported(thorough=True))
            asked: set[str] = set()
            while load:  # a module that was just imported may lead a probe to the next one that it needs
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
                self._in_turn(lambda: self.check_imported(thorough=True))
                for answer in list(self._answers.values()):
                    fault = faults.get(answer.needs) if answer.state == states.WAITING else ""
                    if fault:
                        answer.reason = f"{answer.reason.partition(': ')[0]}: {fault}"
        finally:
            self._collecting.discard(threading.get_ident())
        return loaded

    # ------------------------------------------------------------------ one target

    def _answer_now(
        self, name: str, again: bool, ready: str, thorough: bool, installed: Installed
    ) -> Answer | None:
        """What `decision` says about one target now; None while its module is not imported."""
        wanted = self._targets[name].module
        patched = bool(self._ledger.entries(name))
        if patched and not again and not self._is_open(name, thorough):
            return self._current_answer(name)
        refusal = "" if patched else self._refusal(name)
        if refusal:
            return self._decider.answer(name, states.DISABLED, refusal)
        module = sys.modules.get(wanted) if wanted == ready else finished(wanted)
        return None if module is None else self._decider.decide(name, module, thorough, installed)

    def _answer_before_import(self, name: str) -> Answer:
        """Why a target has not been checked yet."""
        module = self._targets[name].module
        library = module.partition(".")[0]
        here = sys.modules.get(module)
        if here is not None and is_stand_in(here):
            return self._decider.answer(name, states.WAITING, f"what stands in for {module} is no module")
        if here is not None and not is_lazy(here):
            return self._decider.answer(
                name,
                states.WAITING,
                f"{module} is still being imported; apply() or the next target asks again"
                if finished(module) is None
                else f"{module} was imported before the import hook was active; call apply()",
            )
        if is_missing(library):
            return self._decider.answer(name, states.MISSING, f"{library} is not installed")
        return self._decider.answer(name, states.WAITING, f"{module} has not been imported yet")

    # ------------------------------------------------------------------ helpers

    def _refusal(self, name: str) -> str:
        """Why this target must not be patched, as a sentence; empty if it may be."""
        return self._settings().refusal(name) or self._reverted.get(name, "")

    def _is_open(self, name: str, thorough: bool) -> bool:
        answer = self._answers.get(name)
        if answer is None or answer.state == states.WAITING:
            return True
        return thorough and (answer.unprobed or self._is_stale(name, answer))

    def _is_stale(self, name: str, answer: Answer) -> bool:
        """Whether Ctrl-C came between a change and its answer."""
        if self._ledger.entries(name):
            return answer.state == states.DISABLED
        return answer.state in (states.APPLIED, states.UNCLAIMED)

    def _current_answer(self, name: str) -> Answer:
        """The kept answer, updated from the settings and the patched slots; asks no probe."""
        answer = self._answers.get(name)
        if answer is not None and self._is_stale(name, answer):
            answer = None
        if answer is None or answer.state == states.WAITING:
            refusal = self._refusal(name)
            if refusal:
                return self._decider.answer(name, states.DISABLED, refusal)
        if answer is None:
            return self._answer_before_import(name)
        if answer.state in (states.APPLIED, states.UNCLAIMED):
            lost = self._ledger.lost(name)
            if lost:
                reason = f"{'; '.join(lost)}; apply() tries to install it again"
                return self._decider.answer(name, states.OVERWRITTEN, reason, answer.changes)
        return answer

    def _announce(self) -> None:
        """Log one line per process, when something is installed for the first time."""
        with self._lock:
            if self._announced or not self._ledger.order:
                return
            self._announced = True
        log(
            logging.INFO,
            "patching %s; `python -m %s status` lists every fix and its reason",
            self._targets[self._ledger.order[0]].module.partition(".")[0],
            __name__.partition(".")[0],
        )

    def _warn_of_candidates(self, answers: Iterable[Answer]) -> None:
        """Log one line per process, when a release newer than the claims still seems to have a bug.

        Not while `status` collects answers: it prints this for all of them.
        """
        if threading.get_ident() in self._collecting:
            return
        found = [answer for answer in answers if answer.state == states.CANDIDATE and answer.above]
        with self._lock:
            first = bool(found) and not self._warned
            self._warned = self._warned or first
        if first:
            library = found[0].module.partition(".")[0]
            package = __name__.partition(".")[0]
            log(
                logging.WARNING,
                "the installed %s is newer than this version of %s supports, and a known bug seems to be present (%s), "
                "not patched; DIFFUSERS_QUANTFIX=newer patches it, `python -m %s status` lists all",
                library,
                package,
                found[0].id,
                package,
            )

    def _after_fork(self) -> None:
        """In a forked child: the threads that held our lock or were busy with a fix do not exist there."""
        self._lock = threading.Lock()
        self._busy.clear()
        self._missed.clear()
        self._ledger.after_fork()
