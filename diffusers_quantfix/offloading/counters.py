"""How often tensors were changed in place, as far as torch counts it.

Upstream: torch/_C/_autograd.pyi (``_version``).
"""

from __future__ import annotations

from operator import attrgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["has_version", "version_of", "versions"]

_version = attrgetter("_version")


def versions(tensors: Sequence[Any]) -> list[int | None]:
    """`version_of` each of ``tensors``."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # some were made in inference mode
        return list(map(version_of, tensors))


def version_of(tensor: Any) -> int | None:
    """How often ``tensor`` was changed in place; None if that is not counted."""
    if tensor.is_inference():  # also a normal tensor that got inference data: its counter does not move
        return None
    try:
        version: int = tensor._version
    except RuntimeError:
        return None
    return version


def has_version(tensor: Any) -> bool:
    """Whether ``tensor`` has a counter of changes: not if it was made in inference mode, whatever its data is now."""
    try:
        return tensor._version is not None
    except RuntimeError:
        return False
