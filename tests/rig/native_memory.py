"""Memory that a native entry point is given by address, as tensors."""

from __future__ import annotations

from ctypes import c_char

import torch


def at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor over ``count`` elements of raw memory."""
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def matrix(address: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A row-major CPU matrix over raw memory."""
    return at(address, rows * columns, dtype).view(rows, columns)
