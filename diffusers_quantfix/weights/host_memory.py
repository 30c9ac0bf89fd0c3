"""Copies of weights in host memory: whether there is room for a copy, and whether a weight has changed since.

torch is imported here: import this module only where there is a weight.
"""

from __future__ import annotations

import bisect
import sys
from pathlib import Path

import torch

__all__ = ["MappedFiles", "fingerprint", "free_memory", "has_room", "random_numbers"]

# A tensor is read as rows of _ROW 4-byte words, _ROWS rows at a time, which takes 4 MB on the device. The factors are
# few, since they are computed again for each layer: kept ones would be memory that nobody can free.
_ROW, _ROWS = 1 << 13, 1 << 6
_MEMORY = Path("/proc/meminfo")
_MAPPINGS = Path("/proc/self/maps")
_RESERVE = 10  # copies that the user did not ask for leave 1/10 of the memory free


def random_numbers(device: torch.device) -> torch.Tensor:
    """The factors for `fingerprint`, int64 on ``device``: integer arithmetic, so they are the same on every device."""
    numbers = torch.arange(1, _ROW + _ROWS + 1, dtype=torch.int64, device=device)
    for factor, shift in ((0x1E3779B97F4A7C15, 30), (0x3F58476D1CE4E5B9, 27), (0x14D049BB133111EB, 31)):
        numbers *= factor
        numbers ^= (numbers >> shift) & ((1 << (64 - shift)) - 1)
    return numbers


def fingerprint(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor | None:
    """A 64-bit number that depends on every bit of ``tensor``: an int64 scalar tensor on its device.

    It is the sum of its 4-byte words, each multiplied by the random numbers of its column and its row, modulo 2**64.

    Args:
        tensor: a plain tensor.
        numbers: the `random_numbers` of its device.

    Returns:
        None for a tensor that is complex or not contiguous.
    """
    if not tensor.is_contiguous() or tensor.is_complex():
        return None
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    rest = data.numel() % 4
    whole = data.numel() - rest
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    of_columns, of_rows = numbers[:_ROW], numbers[_ROW:] | 1
    for index, words in enumerate(data[:whole].view(torch.int32).split(_ROW * _ROWS)):
        # Odd, and different for each part, so that swapping two parts changes the result.
        factor = 0x1E3779B97F4A7C15 * (2 * index + 1) % 2**63
        rows = words.numel() // _ROW
        if rows:
            sums = words[: rows * _ROW].view(rows, _ROW).to(torch.int64).mul_(of_columns).sum(1)
            total += (sums * of_rows[:rows]).sum() * factor
        last = words[rows * _ROW :].to(torch.int64)
        if last.numel():
            total += last.mul_(of_columns[: last.numel()]).sum() * (factor ^ 2)
    for place in range(rest):
        total += data[whole + place].to(torch.int64) * numbers[-1 - place]
    return total


def free_memory() -> int | None:
    """The available host memory in bytes; None if unknown."""
    return _bytes_of("MemAvailable:")


def has_room(nbytes: int) -> bool:
    """Whether a copy of ``nbytes`` that the user did not ask for leaves enough host memory; True if unknown."""
    free, total = free_memory(), _bytes_of("MemTotal:")
    return free is None or total is None or free - nbytes >= total // _RESERVE


class MappedFiles:
    """The memory of this process that is a mapped file at this moment; unknown where the system is not Linux."""

    def __init__(self) -> None:
        try:
            lines = _MAPPINGS.read_bytes().split(b"\n")
        except OSError:
            lines = []
        # start-end permissions offset device inode path; without a file the inode is 0.
        found = [line.split(maxsplit=5) for line in lines]
        of_files = [one for one in found if len(one) == 6 and one[4] != b"0" and not _is_device(one[5])]
        places = [one[0].split(b"-") for one in of_files]
        self._places = sorted((int(start, 16), int(end, 16)) for start, end in places)

    def hold(self, address: int) -> bool:
        """Whether the byte at ``address`` is that of a file."""
        index = bisect.bisect(self._places, (address, sys.maxsize)) - 1
        return index >= 0 and address < self._places[index][1]


def _is_device(path: bytes) -> bool:
    """Whether it is a device, as pinned memory has; files in memory are in one of the folders of devices."""
    return path.startswith(b"/dev/") and not path.startswith(b"/dev/shm/")


def _bytes_of(name: str) -> int | None:
    try:
        for line in _MEMORY.read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
