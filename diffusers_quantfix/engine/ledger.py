"""The one way to write into a library, and back.

``mend`` of a fix receives a `Draft`.  Nothing is written while it runs; when it has returned, the `Ledger` writes
the whole draft or nothing, and remembers what stood in every slot.  Undo is the ledger read backwards.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import FunctionType, ModuleType

from .foreign import is_native, leads_to, refuse_foreign
from .probe import home_of, name_of, slot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

_GONE = object()


class Entry:
    """One written slot.

    Attributes:
        owner, name: the slot.
        owned: whether the owner itself had it; if not, it was inherited, and undo deletes ours.
        old, new: what stood there, and what we put there.
        alias: whether the slot is a copy of a module's function in another module (``from x import f``).
        fresh: whether nothing but us holds ``new``, so that whoever holds it later has it from us.
    """

    __slots__ = ("alias", "fix_id", "fresh", "name", "new", "old", "owned", "owner")

    def __init__(
        self, fix_id: str, owner: Any, name: str, owned: bool, old: Any, new: Any, alias: bool = False
    ) -> None:
        self.fix_id = fix_id
        self.owner = owner
        self.name = name
        self.owned = owned
        self.old = old
        self.new = new
        self.alias = alias
        self.fresh = False

    @property
    def where(self) -> str:
        """The dotted name of the slot."""
        return f"{name_of(self.owner)}.{self.name}"

    def is_at(self, owner: Any, name: str) -> bool:
        return self.owner is owner and self.name == name

    def current(self) -> Any:
        """What the slot holds now."""
        try:
            owned, value = slot(self.owner, self.name)
        except LookupError:
            return _GONE
        return value if owned else _GONE

    def holds(self) -> bool:
        """Whether the slot still holds exactly what we wrote."""
        return self.current() is self.new

    def reaches(self) -> bool:
        """Whether what we wrote is still called, directly or by a wrapper that someone put over it."""
        return leads_to(self.current(), self.new)

    def taken(self) -> bool:
        """Whether someone else's code stands in the slot, over ours or instead of it.

        The library's own code there means that its module was executed anew: then nothing of ours is left.
        """
        value = self.current()
        if value is _GONE or value is self.new or value is self.old:
            return False
        if leads_to(value, self.new):
            return True
        return not self.alias and not is_native(self.owner, value)

    def intruder(self) -> str:
        """Who holds the slot instead of us, for a sentence."""
        value = self.current()
        if value is _GONE:
            return f"{self.where} was deleted"
        home = home_of(value)
        return f"{self.where} now holds {'code of ' + home if home else repr(value)}"

    def write(self) -> None:
        setattr(self.owner, self.name, self.new)

    def restore(self) -> None:
        _put(self.owner, self.name, self.owned, self.old)


class Draft:
    """What one fix wants to write.  Every verb resolves its target at once and writes nothing.

    Args:
        fix_id: the fix that writes.
        standing: what it has written before.  When it is installed again, it works on what it found the first
            time, not on its own work.
        ledger: where `on_demand` writes later.
    """

    def __init__(self, fix_id: str, standing: Iterable[Entry] = (), ledger: Ledger | None = None) -> None:
        self.fix_id = fix_id
        self._standing = [entry for entry in standing if entry.holds()]
        self._ledger = ledger
        self.entries: list[Entry] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put ``new`` (function, property, classmethod, code object, value) in the place of what stands there.

        Raises:
            TargetMissing: neither the owner nor a base class has the name.
            ForeignPatch: another tool has put its own function there, which ``new`` would silently drop.
        """
        owned, old = self._slot(owner, name)
        if owned:
            refuse_foreign(owner, name, old)
        self._add(owner, name, owned, old, new)

    def around(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)``, a plain function that calls ``original``, in its place.

        The way for hot code: no wrapper object, so torch.compile, pickle and deepcopy see an ordinary function.
        ``make`` receives the function, also that of a staticmethod or classmethod, which becomes one again; a
        property is given as it is, and ``make`` returns a property.  Name, documentation, attributes and
        signature stay those of the original.

        Raises:
            TargetMissing: neither the owner nor a base class has the name.
        """
        owned, old = self._slot(owner, name)
        bound = isinstance(old, (staticmethod, classmethod))
        original = old.__func__ if bound else old
        new = make(original)
        if isinstance(new, FunctionType):
            if isinstance(original, FunctionType):
                functools.update_wrapper(new, original)
            if bound:
                new = type(old)(new)
        self._add(owner, name, owned, old, new)

    def on_demand(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], bool]:
        """`around`, but written when the function that is returned is called: hot code that few processes need.

        That function says whether the slot is written, now or earlier.  It raises nothing, and writes nothing while
        the fix does not stand.  What was asked for once is written at once when the fix is installed again.

        Raises:
            TargetMissing: neither the owner nor a base class has the name.
        """
        self._slot(owner, name)
        ledger = self._ledger
        if ledger is None or ledger.demanded(self.fix_id, owner, name):
            self.around(owner, name, make)
            return lambda: True
        return functools.partial(ledger.demand, self.fix_id, owner, name, make)

    def wrap(
        self, owner: Any, name: str, wrapper: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        """Put a ``wrapt.FunctionWrapper`` around what stands there.  For the loading path only.

        ``wrapper(wrapped, instance, args, kwargs)`` as wrapt calls it.

        Raises:
            TargetMissing: neither the owner nor a base class has the name.
            TypeError: it is a property; wrapt would wrap its value.  Use `around`.
        """
        import wrapt

        owned, old = self._slot(owner, name)
        if isinstance(old, property):
            raise TypeError(f"{name_of(owner)}.{name} is a property, which wrapt cannot wrap")
        # Positional arguments: wrapt 2.0 renamed one of them.
        self._add(owner, name, owned, old, wrapt.FunctionWrapper(old, wrapper))

    def _slot(self, owner: Any, name: str) -> tuple[bool, Any]:
        for entry in self.entries:
            if entry.is_at(owner, name):
                return entry.owned, entry.new
        for entry in self._standing:
            if entry.is_at(owner, name):
                return entry.owned, entry.old
        return slot(owner, name)

    def _add(self, owner: Any, name: str, owned: bool, old: Any, new: Any) -> None:
        for entry in self.entries:
            if entry.is_at(owner, name):
                entry.new = new
                return
        self.entries.append(Entry(self.fix_id, owner, name, owned, old, new))


class Ledger:
    """Everything that this process has written.

    Args:
        libraries: the top-level packages in which ``from x import f`` copies are repaired.
    """

    def __init__(self, libraries: Iterable[str]) -> None:
        self._libraries = frozenset(libraries)
        self._entries: list[Entry] = []
        # Entries whose slot was written anew; modules may still hold copies of what had stood there.
        self._lost: list[Entry] = []
        self._demanded: list[tuple[str, Any, str]] = []
        self._lock = threading.RLock()

    def after_fork(self) -> None:
        """In a forked child: the thread that held the lock may not be there."""
        self._lock = threading.RLock()

    def entries(self, fix_id: str) -> list[Entry]:
        """The entries of one fix, in the order of writing."""
        return [entry for entry in self._entries if entry.fix_id == fix_id]

    def lost(self, fix_id: str) -> list[str]:
        """What stands in the slots of a fix from where its code is not reached any more: one sentence each."""
        return [entry.intruder() for entry in self.entries(fix_id) if not entry.reaches() and not entry.alias]

    def overlap(self, fix_id: str, other: str) -> bool:
        """Whether two fixes have written the same slot."""
        return any(
            mine.is_at(entry.owner, entry.name)
            for mine in self.entries(fix_id)
            for entry in self.entries(other)
        )

    def draft(self, fix_id: str) -> Draft:
        """An empty draft for this fix."""
        return Draft(fix_id, self.entries(fix_id), self)

    def demanded(self, fix_id: str, owner: Any, name: str) -> bool:
        """Whether a fix has once had to write a slot that it could leave alone until then."""
        return any(by == fix_id and where is owner and what == name for by, where, what in self._demanded)

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
                draft.around(owner, name, make)
                self.commit(draft)
            except Exception:  # in the middle of a forward pass: the caller does without
                return False
            self._demanded.append((fix_id, owner, name))
            return True

    def commit(self, draft: Draft) -> None:
        """Write a whole draft; on any fault take back what was written and raise it."""
        fix_id = draft.fix_id
        with self._lock:
            done: list[tuple[Entry, bool, Any]] = []  # with what the owner had just before
            held = self._copies(*_may_be_copied(draft.entries))
            try:
                for entry in draft.entries:
                    entry.fresh = isinstance(entry.owner, ModuleType) and not held.get(id(entry.new))
                    before = _write(entry, done)
                    if not isinstance(entry.owner, ModuleType) or not _defined_in(entry.owner, entry.old):
                        continue
                    copies = held.get(id(entry.old), [])
                    if before is not entry.old:  # our own work of an earlier installation
                        copies = copies + held.get(id(before), [])
                    for holder, name in copies:
                        others = [*draft.entries, *(other for other, _, _ in done)]
                        if not any(other.is_at(holder, name) for other in others):
                            alias = Entry(fix_id, holder, name, True, entry.old, entry.new, alias=True)
                            _write(alias, done)
            except BaseException:
                for entry, owned, value in reversed(done):
                    if entry.holds():
                        _put(entry.owner, entry.name, owned, value)
                raise
            written = [entry for entry, _, _ in done]
            self._entries = [
                entry
                for entry in self._entries
                if entry.fix_id != fix_id or not any(new.is_at(entry.owner, entry.name) for new in written)
            ] + written

    def undo(self, fix_id: str) -> list[str]:
        """Take a fix back, whole or not at all.

        Returns:
            Why it could not be taken back: one sentence per slot that someone else has written over us.  Empty
            when it is undone.
        """
        with self._lock:
            entries = self.entries(fix_id)
            refusals = [entry.intruder() for entry in entries if entry.taken()]
            if refusals:
                return refusals
            for entry in reversed(entries):
                if entry.holds():
                    entry.restore()
            fresh = [entry for entry in [*entries, *self._lost] if entry.fix_id == fix_id and entry.fresh]
            copies = self._copies(*(entry.new for entry in fresh))
            for entry in fresh:
                # Modules imported after us copied our function by name.
                for holder, name in copies.get(id(entry.new), []):
                    setattr(holder, name, entry.old)
            self._entries = [entry for entry in self._entries if entry.fix_id != fix_id]
            self._lost = [entry for entry in self._lost if entry.fix_id != fix_id]
            return []

    def forget_lost(self, fix_id: str) -> None:
        """Drop the entries whose slot was written anew, as by ``importlib.reload``."""
        with self._lock:
            lost = [entry for entry in self.entries(fix_id) if not entry.reaches()]
            self._entries = [entry for entry in self._entries if entry not in lost]
            self._lost += [entry for entry in lost if not entry.alias]

    def _copies(self, *values: Any) -> dict[int, list[tuple[ModuleType, str]]]:
        """Where modules of the watched libraries hold each of the values, under whatever name: id -> places."""
        wanted = {id(value) for value in values if callable(value)}  # the same constant elsewhere is no copy
        places: dict[int, list[tuple[ModuleType, str]]] = {}
        seen = set()
        for name, module in list(sys.modules.items()) if wanted else ():
            if name.partition(".")[0] not in self._libraries or id(module) in seen:
                continue
            # By its type: asking a module of importlib.util.LazyLoader for anything would import it.
            if not issubclass(type(module), ModuleType):
                continue
            seen.add(id(module))
            namespace = object.__getattribute__(module, "__dict__")
            # Without a loop in Python over all of diffusers.
            if wanted.isdisjoint(map(id, list(namespace.values()))):
                continue
            for attribute, held in list(namespace.items()):
                if id(held) in wanted:
                    places.setdefault(id(held), []).append((module, attribute))
        return places


def _may_be_copied(entries: Iterable[Entry]) -> Iterator[Any]:
    """What modules may hold copies of, that has to do with these entries: before and after, and ours of the past."""
    for entry in entries:
        if isinstance(entry.owner, ModuleType):
            yield from (entry.old, entry.new, entry.current())


def _write(entry: Entry, done: list[tuple[Entry, bool, Any]]) -> Any:
    """Write one slot, note it in ``done``, and give what stood there."""
    owned, before = slot(entry.owner, entry.name)
    done.append((entry, owned, before))
    entry.write()
    return before


def _put(owner: Any, name: str, owned: bool, value: Any) -> None:
    if owned:
        setattr(owner, name, value)
    else:
        delattr(owner, name)


def _defined_in(module: ModuleType, value: Any) -> bool:
    """Whether the module is the home of ``value``: copies elsewhere then mean this one.

    A module that itself only imported the function is a holder like the others, and a fix that writes there means
    that slot alone.
    """
    if not callable(value):
        return False
    home = home_of(value)
    ours = home.partition(".")[0] == __name__.partition(".")[0]
    return ours or module.__name__ in (home, getattr(value, "__module__", None))
