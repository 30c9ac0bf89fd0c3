"""The objects of the process that the garbage collector knows; none of them is changed, none of their code is run."""

from __future__ import annotations

import operator
from itertools import chain, compress, repeat, starmap
from types import BuiltinFunctionType, CellType, FunctionType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["PLAIN", "objects_of"]

PLAIN = frozenset(map(id, (dict, list, set, frozenset, FunctionType, BuiltinFunctionType, CellType)))


def objects_of(get: Callable[..., list[Any]], *values: Any, but: frozenset[int] = frozenset()) -> list[Any]:
    """The objects from ``gc.get_objects()`` or ``gc.get_referrers(*values)``, except tuples and those of some types.

    Tuples are removed in one call, so that no other thread runs meanwhile: they include those that other threads are
    still building, and building one fails with SystemError while anything else, such as a list, refers to it.

    Args:
        get: one of the two.
        values: its arguments.
        but: the ``id`` of each type to leave out.
    """
    objects: list[Any] = []
    others: list[Any] = []
    # These iterators read the list only after it is filled.  None of them calls `id`: an audit hook would see that, and
    # while its code runs, other threads may.
    are_others = map(operator.is_not, map(type, objects), repeat(tuple))
    try:
        others.extend(
            chain(
                filter(None, map(objects.extend, starmap(get, (values,)))),
                compress(objects, are_others),
                filter(None, starmap(objects.clear, ((),))),
            )
        )
        return list(compress(others, map(operator.not_, map(but.__contains__, map(id, map(type, others))))))
    finally:
        # It is one of the objects itself, and would keep all others until the next garbage collection.
        others.clear()
        objects.clear()
