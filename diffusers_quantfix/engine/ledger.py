"""The only way to patch a library, and to undo it.

The `Ledger` writes a whole draft or nothing, and keeps the old value of every slot.  Undo restores the values in
reverse order.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import FunctionType, ModuleType

from .by_identity import ByIdentity
from .draft import Draft
from .entry import Entry, put
from .errors import Overtaken
from .foreign import leads_to
from .interruptions import heed_interruption
from .probe import home_of, name_of, slot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, TypeAlias

    _Index: TypeAlias = tuple[
        dict[int, list[Entry]], dict[tuple[int, str], Entry], dict[str, list[Entry]], dict[str, set[str]]
    ]


class Ledger:
    """Everything that this process has written.

    Args:
        libraries: the top-level packages in which ``from x import f`` copies are updated.
        options: returns the user's options, for a `Draft`.
        foundation: the one of ``libraries`` that imports none of the others.
        tops: those of ``libraries`` that none of the others imports from.

    Attributes:
        order: the ids of the installed fixes, in the order of installation.
    """

    def __init__(
        self,
        libraries: Iterable[str],
        options: Callable[[], tuple[str, ...]] = tuple,
        foundation: str = "",
        tops: Iterable[str] = (),
    ) -> None:
        self._options = options
        self._foundation = foundation
        self._libraries = frozenset(libraries)
        self._tops = frozenset(tops)
        self._entries: list[Entry] = []  # replaced as a whole
        self._indexed: tuple[list[Entry] | None, _Index] = None, ({}, {}, {}, {})
        self.order: list[str] = []  # ids of the installed fixes, the last installed at the end
        # Entries whose slot was overwritten; modules may still hold copies of our value.
        self._lost: list[Entry] = []
        self._demanded: list[tuple[str, Any, str]] = []
        # Every slot that was ever written, and for each of our functions that still exists, what was below it.
        self._slots: dict[tuple[int, str], Any] = {}
        self._below = ByIdentity()  # (owned, value)
        self._lock = threading.RLock()

    def after_fork(self) -> None:
        """In a forked child: the thread that held the lock may not exist."""
        self._lock = threading.RLock()

    def entries(self, fix_id: str) -> list[Entry]:
        """The entries of one fix, in the order in which they were written."""
        return list(self._index()[2].get(fix_id, ()))

    def lost(self, fix_id: str) -> list[str]:
        """For each slot from which the fix's code is no longer reached, a sentence about what the slot holds.

        That includes those of modules, classes and functions whose module was executed again.
        """
        gone = [entry for entry in self.entries(fix_id) if not self._reaches(entry) and not entry.alias]
        # Where what was there before is there again, as after ``mock.patch.dict(sys.modules)``.
        again = {
            entry.where
            for entry in self._lost
            if gone and entry.fix_id == fix_id and not entry.is_outdated() and entry.reaches()
        }
        return [entry.intruder() for entry in gone if entry.where not in again]

    def is_executed_again(self, fix_id: str) -> bool:
        """Whether some of what the fix has `lost` is the library's own code again."""
        return bool(self.lost(fix_id)) and any(
            entry.is_outdated() or not (self._reaches(entry) or entry.taken())
            for entry in self.entries(fix_id)
            if not entry.alias
        )

    def lost_in(self, module: str) -> list[str]:
        """The ids of the fixes that have written to this module or its objects and have `lost` some of that, in the
        order of installation."""
        known = self._index()[3].get(module)
        return [fix_id for fix_id in self.order if fix_id in known and self.lost(fix_id)] if known else []

    def overlap(self, fix_id: str, other: str) -> bool:
        """Whether two fixes have written the same slot."""
        return any(
            mine.is_at(entry.owner, entry.name)
            for mine in self.entries(fix_id)
            for entry in self.entries(other)
        )

    def _reaches(self, entry: Entry) -> bool:
        """Whether the value that an entry wrote is still called, or is part of what a later fix made from it.

        A code object does not say what it was made from; a wrapper does.
        """
        if entry.is_outdated():
            return False
        if entry.reaches():
            return True
        later = self._entries[self._entries.index(entry) + 1 :] if entry in self._entries else []
        made_of_it = (one for one in later if one.is_at(entry.owner, entry.name) and one.old is entry.new)
        return any(self._reaches(one) for one in made_of_it)

    def below(self, owner: Any, name: str, value: Any) -> Any:
        """The library's own value of a slot that now holds ``value``: the one below our patches, if ``value`` is ours.

        A module that was imported after us may hold a copy of our function under any name.
        """
        ours, first, *_ = self._index()
        for entry in ours.get(id(value), ()):
            if entry.is_at(owner, name) or isinstance(value, FunctionType):
                return first[id(entry.owner), entry.name].old
        return value

    def _index(self) -> _Index:
        """The entries by the value they wrote, the first entry of each slot, the entries of each fix, and the fixes of
        each module: callers ask about thousands of values."""
        entries, index = self._indexed
        if entries is not self._entries:
            entries, index = self._entries, ({}, {}, {}, {})
            _add(entries, index)
            self._indexed = entries, index
        return index

    def draft(self, fix_id: str) -> Draft:
        """An empty draft for this fix."""
        demanded = [(owner, name) for by, owner, name in self._demanded if by == fix_id]
        return Draft(
            fix_id, self.entries(fix_id), demanded, functools.partial(self.demand, fix_id), self._options
        )

    def demand(self, fix_id: str, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Write a slot of an installed fix, if it is not written yet: the later half of `Draft.on_demand`."""
        with self._lock:
            standing = self.entries(fix_id)
            if any(entry.is_at(owner, name) for entry in standing):
                return True
            if not standing:
                return False
            draft = self.draft(fix_id)
            try:
                draft.wrap_plain(owner, name, make)
                self.commit(draft, later=True)
            except Exception as error:  # in the middle of a forward pass: the caller continues without it
                heed_interruption(error)
                return False
            self._demanded.append((fix_id, owner, name))
            return True

    def commit(self, draft: Draft, later: bool = False) -> None:
        """Write a whole draft; on any error restore what was written, and raise it.

        Args:
            draft: what to write.
            later: whether it adds to an installed fix, which keeps its position in the order: others have patched on
                top of it.

        Raises:
            Overtaken: another thread has written one of the slots meanwhile. Nothing was written.
        """
        fix_id = draft.fix_id
        with self._lock:
            if draft.is_overtaken():
                raise Overtaken(fix_id)
            done: list[tuple[Entry, bool, Any]] = []  # each with the slot's previous value
            held = self._copies(
                _may_be_copied(draft.entries), self._holders(draft.entries), _being_imported(draft.entries)
            )
            state = self._entries, self._lost, self.order
            try:
                for entry in draft.entries:
                    entry.fresh = isinstance(entry.owner, ModuleType) and not held.get(id(entry.new))
                    before = _write(entry, done)
                    if not isinstance(entry.owner, ModuleType) or not _defined_in(entry.owner, entry.old):
                        continue
                    copies = held.get(id(entry.old), [])
                    if before is not entry.old:  # our own patch from an earlier installation
                        copies = copies + held.get(id(before), [])
                    for holder, name in copies:
                        others = [*draft.entries, *(other for other, _, _ in done)]
                        if not any(other.is_at(holder, name) for other in others):
                            alias = Entry(fix_id, holder, name, True, entry.old, entry.new, alias=True)
                            _write(alias, done)
                self._record([entry for entry, _, _ in done], fix_id, later)
            except BaseException:
                for entry, owned, value in reversed(done):
                    if entry.holds():
                        put(entry.owner, entry.name, owned, value)
                self._restore(state)
                raise

    def _record(self, written: list[Entry], fix_id: str, later: bool) -> None:
        for entry in written:
            self._slots[id(entry.owner), entry.name] = entry.owner
            if callable(key := _function(entry.new)):
                self._below.put(key, (entry.owned, entry.old))
        before = kept = self._entries
        if self.entries(fix_id):
            kept = [
                entry
                for entry in before
                if entry.fix_id != fix_id or not any(new.is_at(entry.owner, entry.name) for new in written)
            ]
        indexed = self._indexed  # another thread may replace it
        self._entries = kept + written
        if indexed[0] is before and len(kept) == len(before):
            _add(written, indexed[1])
            self._indexed = self._entries, indexed[1]
        if not later:
            self.order = [*(other for other in self.order if other != fix_id), fix_id]

    def undo(self, fix_id: str) -> list[str]:
        """Remove a fix, completely or not at all, also if an error such as Ctrl-C interrupts it.

        Returns:
            Why it could not be removed: one sentence per slot in which other code lies over ours.  Empty if it was
                removed.
        """
        with self._lock:
            for entry in self.entries(fix_id):
                self._recover(entry.owner, entry.name)
            entries = self.entries(fix_id)
            refusals = [self._above(entry) or entry.intruder() for entry in entries if entry.taken()]
            if refusals:
                return refusals
            state = self._entries, self._lost, self.order
            done: list[tuple[Any, str, Any]] = []  # owner, name, our value
            try:
                # Objects of a module that was executed again may still be in use.
                forgotten = [entry for entry in self._lost if entry.fix_id == fix_id]
                for entry in [*reversed(entries), *reversed(forgotten)]:
                    if entry.holds():
                        done.append((entry.owner, entry.name, entry.new))
                        entry.restore()
                fresh = [entry for entry in [*entries, *self._lost] if entry.fix_id == fix_id and entry.fresh]
                copies = self._copies((entry.new for entry in fresh), self._holders(fresh))
                for entry in fresh:
                    # Modules that were imported after us have copied our function by name.
                    for holder, name in copies.get(id(entry.new), []):
                        done.append((holder, name, entry.new))
                        setattr(holder, name, entry.old)
                self._entries = [entry for entry in self._entries if entry.fix_id != fix_id]
                self._lost = [entry for entry in self._lost if entry.fix_id != fix_id]
                self.order = [other for other in self.order if other != fix_id]
                return []
            except BaseException:  # Ctrl-C
                for owner, name, value in reversed(done):
                    setattr(owner, name, value)
                self._restore(state)
                raise

    def _restore(self, state: tuple[list[Entry], list[Entry], list[str]]) -> None:
        self._entries, self._lost, self.order = state
        self._indexed = None, ({}, {}, {}, {})  # it may have entries that were not kept

    def _above(self, entry: Entry) -> str:
        """A sentence about the fix that has patched over an entry; empty if it is other code."""
        for other in self._entries:
            if other is not entry and other.is_at(entry.owner, entry.name) and other.holds():
                return f"{entry.where} now holds the fix {other.fix_id}, which must be removed first"
        return ""

    def forget_lost(self, fix_id: str) -> None:
        """Drop the entries whose slot was overwritten, for example by ``importlib.reload``."""
        with self._lock:
            lost = [entry for entry in self.entries(fix_id) if not self._reaches(entry)]
            kept = [entry for entry in lost if not entry.alias]
            # Of a module that is executed again and again, the last objects are enough: older ones can be freed.
            places = {entry.where for entry in kept if entry.is_outdated()}
            older = [
                entry
                for entry in self._lost
                if entry.fix_id == fix_id and entry.where in places and entry.is_outdated()
            ]
            for entry in older:
                self._slots.pop((id(entry.owner), entry.name), None)
                self._below.drop(_function(entry.new))
            left = [entry for entry in self._lost if entry not in older]
            self._lost = [*left, *kept]
            self._entries = [entry for entry in self._entries if entry not in lost]

    def recover(self) -> None:
        """Where a slot holds a function of ours again that was forgotten or removed, restore what was below it.

        Pytest's monkeypatch does that: it writes the value that it found, although `revert` or `apply` came meanwhile.
        """
        with self._lock:
            known = {id(entry.new) for entry in (*self._entries, *filter(Entry.is_outdated, self._lost))}
            for (_, name), owner in self._slots.items():
                value = vars(owner).get(name)
                if id(value) not in known and _is_ours(value):
                    self._recover(owner, name)

    def _recover(self, owner: Any, name: str) -> None:
        here = [entry for entry in self._entries if entry.is_at(owner, name)]
        owned, value = True, vars(owner).get(name)
        stale = False
        while _is_ours(value) and not any(entry.new is value for entry in here):
            below = self._below.get(_function(value))
            if below is None:
                return
            stale, (owned, value) = True, below
        if stale:
            put(owner, name, owned, value)
            gone = [entry for entry in here if not leads_to(value, entry.new)]
            self._entries = [entry for entry in self._entries if entry not in gone]
            left = {entry.fix_id for entry in self._entries}
            self.order = [fix_id for fix_id in self.order if fix_id in left]

    def holders(self, homes: Iterable[str]) -> frozenset[str]:
        """The libraries whose modules may hold copies of what these top-level packages define.

        Half of all modules are torch's, and torch imports none of the libraries that are built on it; none of those
        that diffusers is built on has one of its functions.
        """
        homes = frozenset(homes)
        if self._foundation in homes:
            return self._libraries
        return self._tops if homes <= self._tops else self._libraries - {self._foundation}

    def _holders(self, entries: Iterable[Entry]) -> frozenset[str]:
        return self.holders(name_of(entry.owner).partition(".")[0] for entry in entries)

    def _copies(
        self, values: Iterable[Any], libraries: frozenset[str], since: Iterable[str] = ()
    ) -> dict[int, list[tuple[ModuleType, str]]]:
        """Where modules of ``libraries`` hold each of the values, under any name: id of the value -> places.

        Args:
            values: only callables are looked for: the same constant elsewhere is not a copy.
            libraries: top-level packages.
            since: skip modules that come before all of these in `sys.modules`.
        """
        wanted = {id(value) for value in values if callable(value)}
        places: dict[int, list[tuple[ModuleType, str]]] = {}
        seen = set()
        # `list` is atomic. Going through the dictionary itself is not: another thread may import meanwhile.
        names = list(sys.modules) if wanted else []
        if since:
            del names[: min(names.index(name) if name in names else 0 for name in since)]
        for name in names:
            # A program may have put anything into it.
            if type(name) is not str or name.partition(".")[0] not in libraries:
                continue
            module: Any = sys.modules.get(name)
            # Check the type only: any attribute access on a module of importlib.util.LazyLoader would import it.
            if id(module) in seen or not issubclass(type(module), ModuleType):
                continue
            seen.add(id(module))
            namespace = _namespace(module)  # a class of modules may have a `__dict__` of its own
            # No Python loop over all of diffusers.
            if wanted.isdisjoint(map(id, list(namespace.values()))):
                continue
            for attribute, held in namespace.copy().items():
                if id(held) in wanted:
                    places.setdefault(id(held), []).append((module, attribute))
        return places


_namespace: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__


def _being_imported(entries: Iterable[Entry]) -> list[str]:
    """The names of these entries' modules, if all of them are being imported right now; else none.

    Modules that existed before cannot have copies of their functions yet: their own import of the target has not
    returned. (A module that gets a function from one that the target imports would keep upstream's; none of the
    libraries does that.) Nearly all fixes are installed at such a moment, and searching every module of the libraries
    for copies, for each of a hundred fixes, took a tenth of the time of ``import diffusers``. A function from another
    module may have been copied anywhere.
    """
    names = []
    for entry in entries:
        if isinstance(entry.owner, ModuleType):
            loading = getattr(vars(entry.owner).get("__spec__"), "_initializing", False)
            if not loading or not _is_ours(entry.new):
                return []
            names.append(entry.owner.__name__)
    return names


def _is_ours(value: Any) -> bool:
    return home_of(value).partition(".")[0] == __name__.partition(".")[0]


def _may_be_copied(entries: Iterable[Entry]) -> Iterator[Any]:
    """The values that modules may hold copies of: these entries' old and new ones, and our earlier ones."""
    for entry in entries:
        if isinstance(entry.owner, ModuleType) and not entry.only:
            yield from (entry.old, entry.new, entry.current())


def _function(value: Any) -> Any:
    """What weak references can refer to: the function of a property, classmethod or staticmethod."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _add(entries: list[Entry], index: _Index) -> None:
    for entry in entries:
        index[0].setdefault(id(entry.new), []).append(entry)
        index[1].setdefault((id(entry.owner), entry.name), entry)
        index[2].setdefault(entry.fix_id, []).append(entry)
        home = name_of(entry.owner) if isinstance(entry.owner, ModuleType) else home_of(entry.owner)
        index[3].setdefault(home, set()).add(entry.fix_id)


def _write(entry: Entry, done: list[tuple[Entry, bool, Any]]) -> Any:
    """Write one slot, add it to ``done``, and return the previous value."""
    owned, before = slot(entry.owner, entry.name)
    done.append((entry, owned, before))
    entry.write()
    return before


def _defined_in(module: ModuleType, value: Any) -> bool:
    """Whether ``value`` is defined in the module: copies elsewhere then refer to this slot.

    A module that only imported the function holds a copy like any other, and a fix that writes there changes that slot
    alone.
    """
    if not callable(value):
        return False
    return _is_ours(value) or module.__name__ in (home_of(value), getattr(value, "__module__", None))
