"""Copies of weights in the memory of the CPU: whether there is room for one, and whether a weight is what it was.

torch is imported here: import this module where there is a weight.
"""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["fingerprint", "free_memory", "has_room", "random_numbers"]

# Words of 4 bytes are looked at in rows, and so many rows together, which takes 4 MB of the device. The factors are
# few, as they are computed anew for each layer: kept ones would be memory that no one can free.
_ROW, _ROWS = 1 << 13, 1 << 6
_MEMORY = Path("/proc/meminfo")
_RESERVE = 10  # what nobody has asked for leaves one part in so many of the memory free


def random_numbers(device: torch.device) -> torch.Tensor:
    """The factors for `fingerprint` on ``device``: computed there in whole numbers, and so the same everywhere."""
    numbers = torch.arange(1, _ROW + _ROWS + 1, dtype=torch.int64, device=device)
    for factor, shift in ((0x1E3779B97F4A7C15, 30), (0x3F58476D1CE4E5B9, 27), (0x14D049BB133111EB, 31)):
        numbers *= factor
        numbers ^= (numbers >> shift) & ((1 << (64 - shift)) - 1)
    return numbers


def fingerprint(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor | None:
    """A number of 64 bits that depends on every bit of ``tensor``, computed where it is, and left there.

    The sum of its words of 4 bytes, each multiplied with the random numbers of its column and of its row, modulo 2**64.
    None for a tensor that is not contiguous.
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
        # Odd, and another one for each part: two parts that are exchanged are a change.
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
    """Bytes that the CPU can give out, None where that cannot be told."""
    return _bytes_of("MemAvailable:")


def has_room(nbytes: int) -> bool:
    """Whether a copy of ``nbytes`` that the user has not asked for leaves enough; true where that cannot be told."""
    free, total = free_memory(), _bytes_of("MemTotal:")
    return free is None or total is None or free - nbytes >= total // _RESERVE


def _bytes_of(name: str) -> int | None:
    try:
        for line in _MEMORY.read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
