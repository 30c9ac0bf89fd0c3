"""What an object is and what it holds, read without running any of its code.

Attributes of a class cannot be trusted: ``__module__`` is None for what ``numpy.ctypeslib.as_array`` makes, properties
of a metaclass may raise, and ``__class__`` of a lazy proxy imports a library.  ``isinstance`` reads ``__class__``, so
it is not safe for objects of unknown origin either.  CPython's own descriptors are safe: they read the interpreter's
structures.
"""

from __future__ import annotations

import sys
import weakref
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

__all__ = [
    "attributes",
    "class_name",
    "defines",
    "elements_of",
    "is_a",
    "items_of",
    "lasts",
    "module_name",
    "mro",
    "namespace",
    "package_name",
    "slots_of",
    "text_of",
]

_of_type: dict[str, Any] = {
    name: vars(type)[name] for name in ("__dict__", "__flags__", "__module__", "__mro__", "__name__")
}

# By the id of a class, with a weak reference to it: a metaclass may make its classes unhashable.
_slots: dict[int, tuple[Any, tuple[tuple[int, str], ...]]] = {}
_MOST_CLASSES = 4096
_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_TRIES = 20


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Like ``isinstance``, but only the type of ``value`` counts, not its ``__class__``."""
    return issubclass(type(value), kinds)


def mro(kind: type) -> tuple[type, ...]:
    """The classes that ``kind`` is derived from, itself first; empty while another thread is still creating it."""
    return _of_type["__mro__"].__get__(kind) or ()


def class_name(kind: type) -> str:
    """The ``__name__`` of a class."""
    return text_of(_of_type["__name__"].__get__(kind))


def text_of(value: Any) -> str:
    """``value``, which is a string or of a class derived from it, as a plain string; "" for anything else."""
    return str.__str__(value) if is_a(value, str) else ""


def module_name(kind: type) -> str:
    """The ``__module__`` of a class, "" if that is not a string."""
    try:
        name = _of_type["__module__"].__get__(kind)
    except AttributeError:  # deleted
        return ""
    return name if type(name) is str else ""


def package_name(kind: type) -> str:
    """The top-level package of `module_name`."""
    return module_name(kind).partition(".")[0]


def lasts(kind: type) -> bool:
    """Whether a class lives as long as the process, so that a table may keep it: it is built in, or has its name in a
    module. One that a function makes, or a notebook defines again and again, is freed with its last object."""
    if not _of_type["__flags__"].__get__(kind) & _MADE_AT_RUN_TIME:
        return True
    home = module_name(kind)
    module = sys.modules.get(home)
    if home == "__main__" or not is_a(module, ModuleType):
        return False
    return (namespace(module) or {}).get(class_name(kind)) is kind


def attributes(kind: type) -> Mapping[str, Any]:
    """The ``__dict__`` of a class."""
    found: Mapping[str, Any] = _of_type["__dict__"].__get__(kind)
    return found


def defines(kind: type, name: str) -> bool:
    """Whether a class or one of its bases has an attribute of this name."""
    return any(name in attributes(cls) for cls in mro(kind))


def namespace(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object that is not a class; None if it has none, or one of a class derived from dict."""
    for cls in mro(type(value)):
        descriptor: Any = attributes(cls).get("__dict__")
        if type(descriptor) in (GetSetDescriptorType, MemberDescriptorType):
            try:
                found = descriptor.__get__(value)
            except Exception:  # of an extension type
                return None
            return found if type(found) is dict else None
    return None


def slots_of(value: Any) -> list[tuple[str, Any]]:
    """The names and values of an object's ``__slots__`` that are set."""
    kind = type(value)
    classes = mro(kind)
    known = _slots.get(id(kind))
    if known is None or known[0]() is not kind:
        if len(_slots) >= _MOST_CLASSES:
            _slots.clear()
        known = _slots[id(kind)] = weakref.ref(kind), _places_of_slots(classes)
    found = []
    for at, name in known[1]:
        descriptor = attributes(classes[at]).get(name) if at < len(classes) else None
        if type(descriptor) is not MemberDescriptorType:  # the class has other bases or attributes now
            _slots.pop(id(kind), None)
            continue
        try:
            found.append((name, descriptor.__get__(value)))
        except (AttributeError, TypeError):  # not set, or a slot of another class
            continue
    return found


def _places_of_slots(classes: Sequence[type]) -> tuple[tuple[int, str], ...]:
    """The slots of a class: the number of the one of ``classes`` that has it, and its name; a descriptor would keep the
    class alive."""
    return tuple(
        (at, name)
        for at, cls in enumerate(classes)
        if "__slots__" in attributes(cls)
        for name, descriptor in list(attributes(cls).items())
        if type(descriptor) is MemberDescriptorType
    )


def elements_of(held: Any, base: Any) -> list[Any]:
    """The elements of a ``base``, a list, set or deque, that changes at any time: in other threads."""
    for _ in range(_TRIES):
        try:
            return list(base.__iter__(held))
        except RuntimeError:
            continue
    return []


def items_of(held: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items of a dictionary that changes at any time: in other threads, or in finalizers, which the collector runs
    in the middle of ``list(held.items())`` up to Python 3.11. A copy is made in one piece."""
    if type(held) is dict:
        held = dict.copy(held)
    for _ in range(_TRIES):
        try:
            return list(dict.items(held))
        except RuntimeError:  # of a derived class, whose copy would run its code
            continue
    return []
