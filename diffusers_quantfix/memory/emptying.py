"""Empties tensors in place: the objects stay where they are, and their memory goes.

Three steps, each for what the one before could not reach:

1. Every tensor object that shares the memory, wherever it is (a variable, a cache, a hook, the frame of a failed
   call), is found through the garbage collector and is given an empty tensor as its data. A later use of such a
   tensor fails with torch's own error about its shape, not with an illegal memory access.
2. A storage that is still alive has a holder that Python cannot see, an autograd graph for example, or is itself
   held as a storage. It is resized to nothing. The version counters were raised before, so a backward pass through
   such a graph raises torch's error about changed tensors.
3. What cannot be resized (memory that belongs to someone else) stays, and is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..placement.tensors import Held, storage_of
from .census import tensors_with_storage

__all__ = ["Block", "blocks_of", "empty", "is_gone", "tensor_of", "to_cpu"]


@dataclass
class Block:
    """One storage.

    Attributes:
        path: the name of the first tensor that was met in it.
        device: e.g. "cuda:0".
        bytes: its size when it was found.
        weak: a weak reference.
        spared: why it must not be emptied, "" if it may.
        error: what torch said when it could not be.
    """

    path: str
    device: str
    bytes: int
    weak: Any
    spared: str = ""
    error: str = ""


def blocks_of(found: list[Held]) -> dict[int, Block]:
    """The storages behind ``found`` by address; those without memory (meta, empty) are left out."""
    from torch.multiprocessing.reductions import StorageWeakRef

    blocks: dict[int, Block] = {}
    for held in found:
        storage = storage_of(held.tensor)
        if storage is None or held.tensor.is_meta or storage.nbytes() == 0 or storage._cdata in blocks:
            continue
        path = f"{held.component}.{held.name}" if held.name else held.component
        blocks[storage._cdata] = Block(
            path, str(held.tensor.device), storage.nbytes(), StorageWeakRef(storage)
        )
    return blocks


def empty(blocks: dict[int, Block]) -> None:
    """Free the memory of ``blocks``, but for those that are spared. Never raises."""
    addresses = {address for address, block in blocks.items() if not block.spared}
    # Held until all aliases are found: the address of a storage that is gone could be given to another one.
    alive = [_storage(blocks[address]) for address in addresses]
    for tensor in tensors_with_storage(addresses):
        with contextlib.suppress(Exception):
            torch.autograd.graph.increment_version(tensor)
        # What cannot be given other data (a tensor of inference mode) loses its memory in the next step.
        with contextlib.suppress(Exception):
            _give_nothing(tensor)
    del alive
    for address in addresses:
        block = blocks[address]
        storage = _storage(block)
        if storage is not None and storage.nbytes():
            try:
                storage.resize_(0)
            except Exception as error:
                block.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def to_cpu(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors to the CPU, each in place: those of a scheduler, which can be used again. Never raises."""
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            with contextlib.suppress(Exception), torch.no_grad():
                tensor.data = tensor.detach().cpu()


def is_gone(block: Block) -> bool:
    """Whether the memory has been freed."""
    storage = _storage(block)
    return storage is None or bool(storage.nbytes() == 0)


def tensor_of(block: Block) -> torch.Tensor | None:
    """A tensor object that still has the memory of ``block``, None if only something invisible has it."""
    storage = _storage(block)
    return None if storage is None else next(tensors_with_storage({storage._cdata}), None)


def _storage(block: Block) -> Any:
    """The storage if it is still alive, or None."""
    return torch.UntypedStorage._new_with_weak_ptr(block.weak.cdata)


def _give_nothing(tensor: torch.Tensor) -> None:
    # Subclasses (GGUF) intercept even the setting of an attribute; the plain one is meant.
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if tensor.grad is not None:
            tensor.grad = None
        # On its device, where it costs nothing: a pipeline asks its first component for the device to run on, and that
        # may be a text encoder that was released before the run.
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
