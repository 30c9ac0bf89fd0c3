"""Counts the bytes that tensors occupy, each byte once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from operator import add, le

import torch

from .tensors import nbytes, span

__all__ = ["CPU", "Blocks", "is_on_cpu"]

_UNKNOWN = 0
with torch._C.DisableTorchFunction():  # a function mode of the program would be asked
    CPU = torch.device("cpu")
_CHUNK = 256
# For `map`, which loops over the tensors in C; a subclass's own properties are not asked.
_ADDRESS, _IS_CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
is_on_cpu, _NBYTES = torch.Tensor.is_cpu.__get__, torch.Tensor.nbytes.__get__


class Blocks:
    """The memory blocks of tensors: device, address of the first byte and size, in three parallel lists.

    On an accelerator a block is the whole storage of a tensor, even if the tensor is a view of a part. On the CPU it is
    only that part: the storage may be a mapped file that is not in memory. The address is 0 if there is no memory
    ("meta", a lazy parameter) or torch does not report it (a sparse tensor).

    The lists hold no tensors and no objects that the garbage collector tracks.
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
        """Add plain tensors. The caller must keep them alive until `added` is called: freed memory is reused."""
        several = iter(tensors)
        # In small chunks that stay in the processor's cache: a large model has 100,000 tensors.
        while chunk := list(islice(several, _CHUNK)):
            try:
                simple = all(map(is_on_cpu, chunk)) and all(map(_IS_CONTIGUOUS, chunk))
                addresses = list(map(_ADDRESS, chunk)) if simple else ()
            except (NotImplementedError, RuntimeError, ValueError):
                addresses = ()
            if addresses and all(addresses):
                self.devices += [CPU] * len(chunk)
                self.addresses += addresses
                self.sizes += map(_NBYTES, chunk)
            else:
                self._extend_singly(chunk)

    def append(self, other: Blocks) -> None:
        """Add the blocks of ``other``."""
        self.devices += other.devices
        self.addresses += other.addresses
        self.sizes += other.sizes

    def _extend_singly(self, tensors: Iterable[torch.Tensor]) -> None:
        devices, addresses, sizes = self.devices, self.addresses, self.sizes
        for tensor in tensors:
            device = CPU if is_on_cpu(tensor) else tensor.device
            try:
                if device is CPU:
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
        """The bytes that each block adds to those before it: bytes that two blocks share count for the first."""
        added = list(self.sizes)
        if self._apart():
            return added
        on_cpu = []
        storages: set[tuple[torch.device, int]] = set()
        for index, (device, address) in enumerate(zip(self.devices, self.addresses, strict=True)):
            if address == _UNKNOWN:
                continue
            if device is CPU:
                on_cpu.append(index)
            # Addresses of some backends (MPS) are no numbers to calculate with, but equal ones are one storage.
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

    def _apart(self) -> bool:
        """Whether all blocks are on the CPU, and none overlaps another."""
        if len(set(self.devices)) > 1 or CPU not in self.devices or _UNKNOWN in self.addresses:
            return False
        # Sorted, each block begins at or after the end of the one before it.
        begins, ends = sorted(self.addresses), sorted(map(add, self.addresses, self.sizes))
        return all(map(le, ends, islice(begins, 1, None)))

    def _share_out(self, together: list[int], added: list[int]) -> None:
        """Reduce ``added`` of each overlapping block by the bytes that the blocks before it cover."""
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
