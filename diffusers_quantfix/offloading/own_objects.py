"""Tensor objects of a group's own, for buffers that others have too.

A group is moved by assigning the ``.data`` of its tensors. A tensor that came into the place of a buffer during a pass
may also be the output of the model, or belong to the program: that object is not moved.
"""

from __future__ import annotations

import sys

from .counters import has_version
from .group_tensors import address_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["is_plain", "normal", "own_buffers", "own_object"]


def own_buffers(modules: Iterable[Any], known: Iterable[Any]) -> None:
    """Replace those buffers of ``modules`` that have none of the memory of the tensors ``known`` by own objects; shared
    ones stay shared."""
    addresses = set(map(address_of, known))
    replaced: dict[int, tuple[Any, Any]] = {}  # by the identity of a tensor, which is kept alive
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is None or address_of(buffer) in addresses or not is_plain(buffer):
                continue
            if id(buffer) not in replaced:
                replaced[id(buffer)] = buffer, own_object(buffer)
            module._buffers[name] = replaced[id(buffer)][1]


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
