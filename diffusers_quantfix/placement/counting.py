"""Counts the bytes that tensors occupy, each byte of memory once."""

from __future__ import annotations

from typing import Any

from .tensors import held_tensors, nbytes, storage_of, storage_span

__all__ = ["CountedBytes", "component_bytes"]


class CountedBytes:
    """Which bytes of which storage have been counted."""

    def __init__(self) -> None:
        self._covered: dict[tuple[str, int], list[tuple[int, int]]] = {}
        # A storage that dies while we count could hand its address on.
        self._alive: list[Any] = []

    def add(self, tensor: Any) -> int:
        """Count ``tensor``; returns the bytes that were not counted before."""
        storage = storage_of(tensor)
        if storage is None:
            return nbytes(tensor)
        key = (str(tensor.device), storage._cdata)
        start, end = storage_span(tensor)
        covered = self._covered.get(key)
        if covered is None:
            covered = self._covered[key] = []
            self._alive.append(storage)
            if tensor.device.type not in ("cpu", "meta"):
                # On a device the whole block is taken, whatever part of it is looked at. On the CPU it may be a
                # file that is only mapped.
                covered.append((0, max(storage.nbytes(), end)))
                return int(storage.nbytes())
        new = end - start
        for low, high in covered:
            new -= max(0, min(end, high) - max(start, low))
        if new <= 0:
            return 0
        self._covered[key] = _merged([*covered, (start, end)])
        return int(new)


def component_bytes(components: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Component -> device -> bytes without "meta", each byte once; quick enough to be asked at every call."""
    counted = CountedBytes()
    sums: dict[str, dict[str, int]] = {}
    for name, component in components.items():
        counts = sums.setdefault(name, {})
        for held in held_tensors(name, component):
            if not held.tensor.is_meta:
                device = str(held.tensor.device)
                counts[device] = counts.get(device, 0) + counted.add(held.tensor)
    return sums


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged
