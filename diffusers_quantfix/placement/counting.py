"""Counts the bytes that tensors occupy, each byte of memory once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .tensors import nbytes, span, tensors_of

__all__ = ["Blocks", "ComponentBytes"]

_UNKNOWN = 0
_CPU = torch.device("cpu")


class Blocks:
    """The memory that tensors occupy: device, address of the first byte and size of each, in three parallel lists.

    On an accelerator that is the whole storage of a tensor, whatever part of it the tensor shows. On the CPU it is
    that part: the storage may be a file that is mapped into memory and not read. The address is 0 where there is no
    memory ("meta", a lazy parameter) or none that torch tells of (a sparse tensor).

    The lists hold no tensor, and no object that the garbage collector looks at.
    """

    __slots__ = ("addresses", "devices", "sizes")

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self.addresses: list[int] = []
        self.sizes: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Blocks):
            return NotImplemented
        return (self.addresses, self.sizes, self.devices) == (other.addresses, other.sizes, other.devices)

    __hash__ = None  # type: ignore[assignment]

    def extend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add plain tensors. Their memory has to be held until `added`: freed memory is given out again."""
        devices, addresses, sizes = self.devices, self.addresses, self.sizes
        # All of one tensor at a time, while the processor's cache has it: a large model has 100,000.
        for tensor in tensors:
            device = _CPU if tensor.is_cpu else tensor.device
            try:
                if device is _CPU:
                    address = tensor.data_ptr()
                    size = tensor.nbytes if tensor.is_contiguous() else span(tensor)
                elif device.type == "meta":
                    address, size = _UNKNOWN, nbytes(tensor)
                else:
                    storage = tensor.untyped_storage()
                    address, size = storage.data_ptr(), storage.nbytes()
            except (NotImplementedError, RuntimeError, ValueError):
                address, size = _UNKNOWN, nbytes(tensor)
            devices.append(device)
            addresses.append(address)
            sizes.append(size)

    def added(self) -> list[int]:
        """How many bytes each block adds to those before it: what two have in common is counted for the first."""
        added = list(self.sizes)
        on_cpu = []
        storages: set[tuple[torch.device, int]] = set()
        for index, (device, address) in enumerate(zip(self.devices, self.addresses, strict=True)):
            if address == _UNKNOWN:
                continue
            if device is _CPU:
                on_cpu.append(index)
            # Not every backend's addresses can be counted with (MPS), but equal ones are one storage.
            elif (device, address) in storages:
                added[index] = 0
            else:
                storages.add((device, address))
        on_cpu.sort(key=self.addresses.__getitem__)
        together: list[int] = []
        end = 0
        for index in on_cpu:
            address = self.addresses[index]
            if address >= end:
                if len(together) > 1:
                    self._share_out(together, added)
                together = []
            together.append(index)
            end = max(end, address + self.sizes[index])
        if len(together) > 1:
            self._share_out(together, added)
        return added

    def _share_out(self, together: list[int], added: list[int]) -> None:
        """Give to each of some blocks that overlap what those before it did not get."""
        covered: list[tuple[int, int]] = []
        for index in sorted(together):
            start = self.addresses[index]
            end = start + self.sizes[index]
            added[index] -= sum(max(0, min(end, high) - max(start, low)) for low, high in covered)
            if added[index]:
                covered = _merged([*covered, (start, end)])


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


class ComponentBytes:
    """Component -> device -> bytes without "meta", asked for again and again.

    Each time all tensors are looked at, since offload hooks exchange them without telling anyone. From one time to the
    next only the devices, addresses and sizes are kept, no tensor and no module, so that nothing is kept alive. Where
    they are all as they were, so are the sums.

    Args:
        components: name -> module.
    """

    def __init__(self, components: Mapping[str, Any]) -> None:
        self._components = {name: weakref.ref(component) for name, component in components.items()}
        self._known: tuple[list[int], Blocks] | None = None
        self._sums: dict[str, dict[str, int]] = {}

    def now(self) -> dict[str, dict[str, int]]:
        """The bytes as they are now. The dicts are shared between calls: they are to be read only."""
        blocks, ends = Blocks(), []
        # A tensor subclass needs tens of microseconds for every attribute otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            for component in self._components.values():
                module = component()
                if module is not None:
                    blocks.extend(tensors_of(module))
                ends.append(len(blocks))
        if (ends, blocks) != self._known:
            self._known = ends, blocks
            self._sums = _sums(dict(zip(self._components, ends, strict=True)), blocks)
        return self._sums


def _sums(ends: Mapping[str, int], blocks: Blocks) -> dict[str, dict[str, int]]:
    added = blocks.added()
    sums: dict[str, dict[str, int]] = {}
    first = 0
    for name, end in ends.items():
        counts = dict.fromkeys(blocks.devices[first:end], 0)
        if len(counts) == 1:
            counts = dict.fromkeys(counts, sum(added[first:end]))
        else:
            for device, count in zip(blocks.devices[first:end], added[first:end], strict=True):
                counts[device] += count
        sums[name] = {str(device): count for device, count in counts.items() if device.type != "meta"}
        first = end
    return sums
