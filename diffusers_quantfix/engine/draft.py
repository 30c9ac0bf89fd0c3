"""What one fix wants to write into a library.

A fix's ``patch`` receives a `Draft`.  Nothing is written while it runs; after it has returned, the ledger writes the
whole draft or nothing.
"""

from __future__ import annotations

import functools
import sys
from types import FunctionType, ModuleType

from .entry import Entry
from .foreign import refuse_foreign
from .likeness import made_like
from .probe import BASES, name_of, slot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


class Draft:
    """What one fix wants to write.  Every method looks up its slot at once and writes nothing.

    Args:
        fix_id: the fix that writes.
        standing: what it has written before.  When it is installed again, it starts from what it found the first time,
            not from its own patch.
        demanded: the slots, as (owner, name), that `on_demand` did not write at first and that were needed later.
        demand: writes such a slot, ``demand(owner, name, make)``; without it `on_demand` writes at once.
        options: see below.

    Attributes:
        options: returns the options that the user has currently chosen: ``<library>:<option>``.
    """

    def __init__(
        self,
        fix_id: str,
        standing: Iterable[Entry] = (),
        demanded: Iterable[tuple[Any, str]] = (),
        demand: Callable[[Any, str, Callable[[Any], Any]], bool] | None = None,
        options: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self.fix_id = fix_id
        self.options = options
        self._standing = [entry for entry in standing if entry.holds()]
        self._demanded = list(demanded)
        self._demand = demand
        self.entries: list[Entry] = []
        self._seen: list[tuple[Any, str, Any]] = []  # owner, name, what the slot held

    def is_overtaken(self) -> bool:
        """Whether a slot holds something else than when it was looked up: another fix was installed meanwhile."""
        return any(slot(owner, name)[1] is not value for owner, name, value in self._seen)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace the slot's value with ``new`` (function, property, classmethod, code object, value).

        It is written as it is: `wrap_plain` makes a function look like the old one.

        Raises:
            TargetMissing: neither the owner nor a base class has the name.
            ForeignPatch: another tool has put its own function there, which ``new`` would silently remove.
        """
        owned, old = self._slot(owner, name)
        if owned:
            refuse_foreign(owner, name, old)
        self._add(owner, name, owned, old, new)

    def wrap_plain(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)``, a plain function that calls ``original``, in its place.

        ``torch.compile``, pickle, deepcopy and inspect see an ordinary function. ``make`` receives the function,
        unwrapped from a staticmethod, classmethod or cached property, and the result is wrapped again; a property is
        passed as it is, and ``make`` returns a property.  Names, documentation, attributes and signature stay those of
        the original; if the owner has it from another class or module, the new one is named as the owner's.

        Raises:
            TargetMissing: neither the owner nor a base class has the name.
        """
        only = _is_only_reference(owner, name)
        owned, old = self._slot(owner, name)
        new = made_like(old, make, owner, name)
        self._add(owner, name, owned, old, new, only)

    def inherit(self, cls: type, base: type) -> None:
        """Add ``base`` as the last base class of ``cls``: its methods are found there, also when they are patched
        later."""
        owned, old = self._slot(cls, BASES)
        self._add(cls, BASES, owned, old, old if base in old else (*old, base))

    def on_demand(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], bool]:
        """`wrap_plain`, but written only when the returned function is called: for hot code that few processes need.

        Its only caller is the repacking of 4-bit weights on some CPUs: otherwise every forward pass on a GPU would go
        through two frames of ours for something that never happens there.

        The returned function says whether the slot is written, now or earlier.  It raises nothing, and writes nothing
        while the fix is not installed.  A slot that was demanded once is written immediately when the fix is installed
        again.

        Raises:
            TargetMissing: neither the owner nor a base class has the name.
        """
        self._slot(owner, name)
        if self._demand is None or any(where is owner and what == name for where, what in self._demanded):
            self.wrap_plain(owner, name, make)
            return lambda: True
        return functools.partial(self._demand, owner, name, make)

    def wrap_wrapt(
        self,
        module: ModuleType,
        name: str,
        wrapper: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        """Wrap a module's function in a ``wrapt.FunctionWrapper``.  For the loading path only.

        Signature, defaults, source and documentation are those of upstream's function; the wrapper is pickled and
        copied by reference, as every function is.  Not for methods: bound by a class, a wrapper is not a method, and
        its ``__func__`` is upstream's, which bypasses the patch.

        Args:
            module: that defines the function.
            name: of the function.
            wrapper: called as ``wrapper(wrapped, instance, args, kwargs)``; ``instance`` is None.

        Raises:
            TargetMissing: the module has no such name.
            TypeError: it is not a module's function.  Use `wrap_plain`.
        """
        from .loading_wrapper import wrapped

        only = _is_only_reference(module, name)
        owned, old = self._slot(module, name)
        if not isinstance(module, ModuleType) or not isinstance(old, FunctionType):
            raise TypeError(f"{name_of(module)}.{name} is not a module's function: use wrap_plain")
        self._add(module, name, owned, old, wrapped(old, wrapper), only)

    def _slot(self, owner: Any, name: str) -> tuple[bool, Any]:
        for entry in self.entries:
            if entry.is_at(owner, name):
                return entry.owned, entry.new
        owned, held = slot(owner, name)
        if slot(owner, name)[1] is held:  # else it is made anew each time, as a bound method
            self._seen.append((owner, name, held))
        for entry in self._standing:
            if entry.is_at(owner, name):
                return entry.owned, entry.old
        return owned, held

    def _add(self, owner: Any, name: str, owned: bool, old: Any, new: Any, only: bool = False) -> None:
        for entry in self.entries:
            if entry.is_at(owner, name):
                entry.new, entry.only = new, entry.only and only
                return
        entry = Entry(self.fix_id, owner, name, owned, old, new)
        entry.only = only
        self.entries.append(entry)


def _is_only_reference(owner: Any, name: str) -> bool:
    """Whether a module's own slot holds the only reference to its function, so that no module has a copy of it.

    The search for copies looks at every module of the libraries, and most functions have none. How many references the
    counting itself needs depends on the interpreter, so a function that surely has no copy is counted the same way.
    """
    if not isinstance(owner, ModuleType):
        return False
    namespace = vars(owner)
    if type(namespace.get(name)) is not FunctionType:
        return False
    return _references(namespace, name) == _references({name: lambda: None}, name)


def _references(namespace: dict[str, Any], name: str) -> int:
    return sys.getrefcount(namespace[name])
