"""The objects of the process that the garbage collector knows; none of them is changed, none of their code is run."""

from __future__ import annotations

import operator
from itertools import chain, compress, starmap
from types import BuiltinFunctionType, CellType, FunctionType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["PLAIN", "objects_of"]

_TUPLE = frozenset({id(tuple)})
PLAIN = frozenset(map(id, (tuple, dict, list, set, frozenset, FunctionType, BuiltinFunctionType, CellType)))


def objects_of(get: Callable[..., list[Any]], *values: Any, but: frozenset[int] = _TUPLE) -> list[Any]:
    """The objects from ``gc.get_objects()`` or ``gc.get_referrers(*values)``, except those of some types.

    All in one call, so that no other thread runs meanwhile: the objects include tuples that other threads are still
    building, and building one fails with SystemError while anything else, such as a list, refers to it.

    Args:
        get: one of the two.
        values: its arguments.
        but: the ``id`` of each type to leave out.
    """
    objects: list[Any] = []
    # These iterators read the list only after it is filled.
    skipped = map(but.__contains__, map(id, map(type, objects)))
    return list(
        chain(
            filter(None, map(objects.extend, starmap(get, (values,)))),
            compress(objects, map(operator.not_, skipped)),
            filter(None, starmap(objects.clear, ((),))),
        )
    )
