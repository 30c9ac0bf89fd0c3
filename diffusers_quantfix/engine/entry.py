"""A written slot: its old value, its new value, and how to restore it."""

from __future__ import annotations

from types import CodeType

from .bytecode import is_copy
from .foreign import is_native, leads_to
from .monitored import watch_also
from .probe import home_of, name_of, slot
from .reloaded import is_defined_again

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_GONE = object()


class Entry:
    """One written slot.

    Attributes:
        owner, name: the slot.
        owned: whether the owner itself had the name; if not, it was inherited, and undo deletes ours.
        old, new: the value before, and the value that we wrote.
        alias: whether the slot is another module's copy of the function (``from x import f``).
        only: whether nothing but the slot referred to ``old``, and nothing at all to ``new``: there are no copies.
        fresh: whether there was no other reference to ``new``, so that every later reference comes from our slot.
    """

    __slots__ = ("alias", "fix_id", "fresh", "name", "new", "old", "only", "owned", "owner")

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
        self.only = False
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
        """Whether our code is still called, directly or through a wrapper around it."""
        value = self.current()
        if isinstance(value, CodeType) and isinstance(self.new, CodeType):
            # Profilers of lines put a copy in its place, with more instructions that do nothing.
            return value is self.new or (value is not self.old and is_copy(value, self.new))
        return leads_to(value, self.new)

    def taken(self) -> bool:
        """Whether the slot holds other code, around ours or instead of it.

        The library's own code does not count: its module was executed again, and nothing of ours is left.
        """
        value = self.current()
        if value is _GONE or value is self.new or value is self.old:
            return False
        if self.reaches():
            return True
        return not self.alias and not is_native(self.owner, value)

    def intruder(self) -> str:
        """What the slot holds instead of our code, for a sentence."""
        value = self.current()
        if value is _GONE:
            return f"{self.where} was deleted"
        if self.is_outdated():
            return f"{name_of(self.owner)} was defined again"
        home = home_of(value)
        return f"{self.where} now holds {'code of ' + home if home else repr(value)}"

    def is_outdated(self) -> bool:
        """Whether the owner's module was executed again, so that another object has the owner's name now."""
        return is_defined_again(self.owner)

    def write(self) -> None:
        put(self.owner, self.name, True, self.new)

    def restore(self) -> None:
        put(self.owner, self.name, self.owned, self.old)


def put(owner: Any, name: str, owned: bool, value: Any) -> None:
    """Write a value, or delete the name if the owner did not have it."""
    if isinstance(value, CodeType) and isinstance(before := getattr(owner, name, None), CodeType):
        watch_also(value, before)
    if owned:
        setattr(owner, name, value)
    else:
        delattr(owner, name)
