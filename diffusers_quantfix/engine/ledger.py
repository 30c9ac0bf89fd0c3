"""The one way to write into a library, and back.

``mend`` of a fix receives a `Draft`.  Nothing is written while it runs; when it has returned, the `Ledger` writes
the whole draft or nothing, and remembers what stood in every slot.  Undo is the ledger read backwards.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType

from .fix import ForeignPatch
from .probe import home_of, name_of, slot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

OURS = __name__.partition(".")[0]


class Entry:
    """One written slot."""

    __slots__ = ("fix_id", "name", "new", "old", "owned", "owner")

    def __init__(self, fix_id: str, owner: Any, name: str, owned: bool, old: Any, new: Any) -> None:
        self.fix_id = fix_id
        self.owner = owner
        self.name = name
        self.owned = owned
        self.old = old
        self.new = new

    @property
    def where(self) -> str:
        """The dotted name of the slot."""
        return f"{name_of(self.owner)}.{self.name}"

    def current(self) -> Any:
        """What the slot holds now; None when it is gone."""
        try:
            owned, value = slot(self.owner, self.name)
        except LookupError:
            return None
        return value if owned else None

    def holds(self) -> bool:
        """Whether the slot still holds exactly what we wrote."""
        return self.current() is self.new

    def reaches(self) -> bool:
        """Whether what we wrote is still called, by us or by a wrapper that someone put over it."""
        value = self.current()
        for _ in range(64):
            if value is self.new:
                return True
            value = getattr(value, "__wrapped__", None)
            if value is None:
                return False
        return False

    def intruder(self) -> str:
        """Who holds the slot instead of us, for a sentence."""
        value = self.current()
        home = home_of(value) if value is not None else ""
        return f"{self.where} now holds {'code of ' + home if home else repr(value)}"

    def write(self) -> None:
        setattr(self.owner, self.name, self.new)

    def restore(self) -> None:
        if self.owned:
            setattr(self.owner, self.name, self.old)
        else:
            delattr(self.owner, self.name)


class Draft:
    """What one fix wants to write.  Every verb resolves its target at once and writes nothing."""

    def __init__(self, fix_id: str) -> None:
        self._fix_id = fix_id
        self.entries: list[Entry] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put ``new`` (function, property, classmethod, code object, value) in the place of what stands there.

        Raises:
            TargetMissing: neither the owner nor a base class has the name.
            ForeignPatch: another tool has put its own function there, which ``new`` would silently drop.
        """
        owned, old = slot(owner, name)
        if owned:
            _refuse_foreign(owner, name, old)
        self._add(owner, name, owned, old, new)

    def around(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)``, a plain function that calls ``original``, in its place.

        The way for hot code: no wrapper object, so torch.compile, pickle and deepcopy see an ordinary function.
        ``make`` receives the raw value of the slot (a function, for a method) and may return a property.
        """
        owned, old = slot(owner, name)
        new = make(old)
        if isinstance(new, FunctionType) and isinstance(old, FunctionType):
            new.__name__, new.__qualname__, new.__module__ = old.__name__, old.__qualname__, old.__module__
            new.__doc__ = old.__doc__
            new.__wrapped__ = old  # type: ignore[attr-defined]  # inspect.signature follows it
        self._add(owner, name, owned, old, new)

    def wrap(
        self, owner: Any, name: str, wrapper: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        """Put a ``wrapt.FunctionWrapper`` around what stands there.  For the loading path only.

        ``wrapper(wrapped, instance, args, kwargs)`` as wrapt calls it.
        """
        import wrapt

        owned, old = slot(owner, name)
        # Positional arguments: wrapt 2.0 renamed one of them.
        self._add(owner, name, owned, old, wrapt.FunctionWrapper(old, wrapper))

    def _add(self, owner: Any, name: str, owned: bool, old: Any, new: Any) -> None:
        self.entries.append(Entry(self._fix_id, owner, name, owned, old, new))


class Ledger:
    """Everything that this process has written.

    Args:
        libraries: the top-level packages in which ``from x import f`` copies are repaired.
    """

    def __init__(self, libraries: Iterable[str]) -> None:
        self._libraries = frozenset(libraries)
        self._entries: list[Entry] = []

    def entries(self, fix_id: str) -> list[Entry]:
        """The entries of one fix, in the order of writing."""
        return [entry for entry in self._entries if entry.fix_id == fix_id]

    def commit(self, draft: Draft) -> None:
        """Write a whole draft; on any fault take back what was written and raise it."""
        done: list[Entry] = []
        try:
            for entry in draft.entries:
                entry.write()
                done.append(entry)
                if isinstance(entry.owner, ModuleType):
                    for holder, name in self._copies(entry.old, entry.owner):
                        alias = Entry(entry.fix_id, holder, name, True, entry.old, entry.new)
                        alias.write()
                        done.append(alias)
        except BaseException:
            for entry in reversed(done):
                entry.restore()
            raise
        self._entries.extend(done)

    def undo(self, fix_id: str) -> list[str]:
        """Take a fix back, whole or not at all.

        Returns:
            Why it could not be taken back: one sentence per slot that someone else has written over us.  Empty
            when it is undone.
        """
        entries = self.entries(fix_id)
        refusals = [entry.intruder() for entry in entries if not entry.holds()]
        if refusals:
            return refusals
        for entry in reversed(entries):
            if isinstance(entry.owner, ModuleType):
                # Modules imported after us copied our function by name.
                for holder, name in self._copies(entry.new, entry.owner):
                    setattr(holder, name, entry.old)
            entry.restore()
        self._entries = [entry for entry in self._entries if entry.fix_id != fix_id]
        return []

    def forget_lost(self, fix_id: str) -> None:
        """Drop the entries whose slot was written anew, as by ``importlib.reload``."""
        self._entries = [entry for entry in self._entries if entry.fix_id != fix_id or entry.reaches()]

    def _copies(self, value: Any, owner: ModuleType) -> Iterator[tuple[ModuleType, str]]:
        """Where modules of the watched libraries hold ``value`` under a name of their own."""
        if not isinstance(value, (FunctionType, type)) and not hasattr(value, "__wrapped__"):
            return  # a constant: the same object elsewhere is no copy of this one
        for name, module in list(sys.modules.items()):
            if module is owner or name.partition(".")[0] not in self._libraries:
                continue
            if not isinstance(module, ModuleType):
                continue
            for attribute, held in list(vars(module).items()):
                if held is value:
                    yield module, attribute


def _refuse_foreign(owner: Any, name: str, value: Any) -> None:
    """Raise `ForeignPatch` when ``value`` was put there by a tool that the owner's module does not know.

    A method may well be of another library from the start: ``@torch.no_grad()`` makes it a function of torch.  But
    then the module that defines it has imported something of that library.
    """
    home = home_of(value) if _is_code(value) else ""
    library = home.partition(".")[0]
    module = owner if isinstance(owner, ModuleType) else sys.modules.get(getattr(owner, "__module__", ""))
    if not home or module is None or library in (OURS, module.__name__.partition(".")[0]):
        return
    if any(_library_of(held) == library for held in list(vars(module).values())):
        return
    raise ForeignPatch(
        f"{name_of(owner)}.{name} was replaced by {home} before us; import {OURS} before it, or leave it as it is"
    )


def _is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, property, staticmethod, classmethod)) or hasattr(
        value, "__wrapped__"
    )


def _library_of(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]
