"""The tensors in the inputs or the output of a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["nested_tensors"]


def nested_tensors(value: Any) -> Iterator[Any]:
    """Yield ``value`` if it is a tensor, and those in it if it is a tuple, list or mapping of them, at any depth."""
    if isinstance(value, sys.modules["torch"].Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from nested_tensors(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from nested_tensors(one)
