"""Shared memory for wrappers: optimum-quanto and torchao weights, whose bytes are those of their inner tensors.

A wrapper's own storage has a size and no memory: ``torch.Tensor.share_memory_`` copies from address zero.

Upstream: torch/_tensor.py (``Tensor.share_memory_``, ``Tensor.is_shared``), torch/storage.py (``_share_memory_``).
"""

from __future__ import annotations

from .wrappers import inner_places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["asking_the_inner", "is_torchs", "sharing_the_inner"]


def is_torchs(cls: type) -> bool:
    """Whether a wrapper of ``cls`` has torch's method, which ends the process; for probes, which cannot call it."""
    import torch

    return getattr(cls, "share_memory_", None) is torch.Tensor.share_memory_


def sharing_the_inner(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``share_memory_`` of a wrapper class: its inner tensors are moved into shared memory."""

    def share_memory_(self: Any) -> Any:
        places = inner_places(self)
        if not places:
            return original(self)
        for holder, name in places:
            getattr(holder, name).share_memory_()
        return self

    return share_memory_


def asking_the_inner(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``is_shared`` of a wrapper class: whether all its inner tensors are in shared memory."""

    def is_shared(self: Any) -> bool:
        places = inner_places(self)
        if not places:
            return bool(original(self))
        return all(getattr(holder, name).is_shared() for holder, name in places)

    return is_shared
