"""torch's memory statistics, for accelerators of any type; for MPS there are fewer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..loading.device import accelerator_types

__all__ = ["allocated", "devices", "empty_caches", "peak", "reset_peak", "synchronize"]


def devices() -> list[str]:
    """The accelerator devices whose memory torch counts ("cuda:0", ...); empty on a CPU-only machine."""
    found = []
    for kind in accelerator_types():
        backend: Any = getattr(torch, kind, None)
        if hasattr(backend, "memory_allocated"):
            found += [f"{kind}:{index}" for index in range(backend.device_count())]
    return found


def allocated(device: str) -> int:
    """Bytes of all live tensors on ``device``, including those of other code."""
    return int(_backend(device).memory_allocated(torch.device(device)))


def peak(device: str) -> int:
    """The most bytes held on ``device`` since `reset_peak`."""
    return int(_backend(device).max_memory_allocated(torch.device(device)))


def reset_peak(device: str) -> None:
    """Start a new interval for `peak`. This resets torch's peak statistics for the whole process."""
    _backend(device).reset_peak_memory_stats(torch.device(device))


def synchronize(names: Iterable[str]) -> None:
    """Wait until the devices have completed all queued work: kernels may still read memory that is about to be freed,
    and pending copies the buffers in host memory. A device that this process does not use is skipped: a context
    there would take memory."""
    for name in names:
        device = torch.device(name)
        backend = _backend(name)
        if backend.memory_reserved(device):  # includes allocated memory
            backend.synchronize(device)
    if torch.backends.mps.is_available():
        torch.mps.synchronize()


def empty_caches(kinds: Iterable[str]) -> None:
    """Return freed memory on device types ("cuda") to the system, so that other programs can use it."""
    for kind in kinds:
        backend: Any = getattr(torch, kind, None)
        if hasattr(backend, "empty_cache"):
            backend.empty_cache()


def _backend(device: str) -> Any:
    return getattr(torch, torch.device(device).type)
