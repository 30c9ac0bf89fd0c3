"""CPU views that keep a much larger storage alive: a tensor of four numbers may be a view of one with a million.

On the CPU `audit` counts only the bytes of the view, since the rest may be a mapped file that is never read. On an
accelerator it counts the whole storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..text import human
from .counting import is_on_cpu
from .tensors import storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .tensors import Held

__all__ = ["kept_by_views"]

# A smaller difference is padding and alignment.
_LEAST = 1 << 20


def kept_by_views(held: Iterable[Held], sizes: Iterable[int]) -> list[str]:
    """A note for each CPU storage with 1 MiB or more that no view shows.

    Args:
        held: the tensors.
        sizes: the bytes that each adds to those before it (`Blocks.added`).
    """
    found = list(zip(held, sizes, strict=True))
    largest: dict[int, tuple[int, Held]] = {}
    for one, _ in found:
        storage = storage_of(one.tensor) if is_on_cpu(one.tensor) else None
        # Most tensors have their own storage.
        if storage is not None and storage.nbytes() - one.tensor.nbytes >= _LEAST:
            largest.setdefault(storage._cdata, (storage.nbytes(), one))
    shown = dict.fromkeys(largest, 0)
    for one, added in found if largest else ():
        storage = storage_of(one.tensor) if is_on_cpu(one.tensor) else None
        if storage is not None and storage._cdata in shown:
            shown[storage._cdata] += added
    return [
        f"{one.component}.{one.name} is a view on the CPU: {human(shown[key])} of {human(size)} are counted, and all "
        "are kept, in memory unless that is a mapped file; a `.clone()` keeps its own bytes only"
        for key, (size, one) in largest.items()
        if size - shown[key] >= _LEAST
    ]
