"""A mapping whose keys are objects by their identity, which are not kept alive."""

from __future__ import annotations

import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["ByIdentity"]


class ByIdentity:
    """Values for objects.

    In a `weakref.WeakKeyDictionary` all wrapt wrappers of one function would be one key: they hash and compare as what
    they wrap, and the end of one would remove the value of another.
    """

    def __init__(self) -> None:
        found: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._found = found

        # One for all keys: for each its own function would be four more objects for the collector to go through.
        def ended(reference: _Reference) -> None:
            found.pop(reference.number, None)

        self._ended = ended

    def put(self, key: Any, value: Any) -> None:
        """Raises TypeError if ``key`` cannot be referred to weakly."""
        reference = _Reference(key, self._ended)
        reference.number = id(key)
        self._found[reference.number] = reference, value

    def get(self, key: Any) -> Any:
        """The value for ``key``, or None."""
        known = self._found.get(id(key))
        return known[1] if known is not None and known[0]() is key else None

    def has_all(self, keys: Iterable[Any]) -> bool:
        """Whether each of ``keys``, which the caller keeps alive, has a value; no Python loop."""
        return all(map(self._found.__contains__, map(id, keys)))

    def drop(self, key: Any) -> None:
        self._found.pop(id(key), None)


class _Reference(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("number",)

    number: int
