"""Tensor objects of a group's own, for buffers that others have too.

A group is moved by assigning the ``.data`` of its tensors. A tensor that came into the place of a buffer during a pass
may also be the output of the model, or belong to the program: that object is not moved.
"""

from __future__ import annotations

import sys

from .counters import has_version
from .group_tensors import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["is_plain", "newcomers", "normal", "own_buffers", "own_object"]


def newcomers(modules: Iterable[Any], known: Iterable[Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """Those buffers of ``modules`` that are none of the tensors ``known``, each with its place."""
    identities = set(map(identity, known))
    return [
        (module._buffers, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and is_plain(buffer) and identity(buffer) not in identities
    ]


def own_buffers(found: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    """Replace these `newcomers` by own objects; shared ones stay shared."""
    replaced: dict[int, tuple[Any, Any]] = {}  # by the identity of a tensor, which is kept alive
    for places, name, buffer in found:
        if id(buffer) not in replaced:
            replaced[id(buffer)] = buffer, own_object(buffer)
        places[name] = replaced[id(buffer)][1]


def own_object(buffer: Any) -> Any:
    """Another tensor with the memory of ``buffer``."""
    return normal(buffer.data)


def normal(buffer: Any) -> Any:
    """``buffer``, or for one made in inference mode a tensor with the same data that can be moved outside of it."""
    torch = sys.modules["torch"]
    if has_version(buffer):
        return buffer
    with torch.inference_mode(False):
        other = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    other.data = buffer
    return other


def is_plain(buffer: Any) -> bool:
    """Whether ``buffer`` can be moved by assigning its ``.data``, without a graph that leads to it."""
    torch = sys.modules["torch"]
    return bool(
        type(buffer) is torch.Tensor
        and not buffer.requires_grad
        and buffer.layout == torch.strided
        and not buffer.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(buffer)
    )
