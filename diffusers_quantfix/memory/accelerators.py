"""What torch itself says about the memory of accelerators, whichever there are; of MPS it says less than of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..loading.device import accelerator_types

__all__ = ["allocated", "devices", "empty_caches", "peak", "reset_peak", "synchronize"]


def devices() -> list[str]:
    """The accelerator devices whose memory torch counts, "cuda:0" and so on; empty on a CPU-only machine."""
    found = []
    for kind in accelerator_types():
        backend: Any = getattr(torch, kind, None)
        if hasattr(backend, "memory_allocated"):
            found += [f"{kind}:{index}" for index in range(backend.device_count())]
    return found


def allocated(device: str) -> int:
    """Bytes that live tensors hold on ``device``, whoever they belong to."""
    return int(_backend(device).memory_allocated(torch.device(device)))


def peak(device: str) -> int:
    """The most bytes held on ``device`` since `reset_peak`."""
    return int(_backend(device).max_memory_allocated(torch.device(device)))


def reset_peak(device: str) -> None:
    """Begin a new interval for `peak`. Whoever else reads torch's peak statistics sees it, too."""
    _backend(device).reset_peak_memory_stats(torch.device(device))


def synchronize(names: Iterable[str]) -> None:
    """Wait until the devices have done all that was asked of them: kernels still read what is to be freed, and copies
    under way the buffers in host memory. A device that has nothing is not asked, since that would take memory there."""
    for name in names:
        device = torch.device(name)
        backend = _backend(name)
        if backend.memory_reserved(device):  # what is allocated is part of it
            backend.synchronize(device)
    if torch.backends.mps.is_available():
        torch.mps.synchronize()


def empty_caches(kinds: Iterable[str]) -> None:
    """Give the freed memory of device types ("cuda") back, so that other programs can have it."""
    for kind in kinds:
        backend: Any = getattr(torch, kind, None)
        if hasattr(backend, "empty_cache"):
            backend.empty_cache()


def _backend(device: str) -> Any:
    return getattr(torch, torch.device(device).type)
