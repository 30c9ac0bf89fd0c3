"""Empties tensors in place: the objects stay where they are, and their memory goes.

Three steps, each for what the one before could not reach:

1. Every tensor object on the memory, wherever it is (a variable, a cache, a hook, the frame of a failed call), is found
   through the garbage collector and is given an empty tensor as its data. A later use of such a tensor fails with
   torch's own error about its shape, not with an illegal memory access. A tensor that something outside of torch and
   Python can reach (see `references`) is left.
2. A storage that is still alive is held by an autograd graph, or by itself as a storage. It is resized to nothing. The
   version counters were raised before, so a backward pass through such a graph raises torch's error about changed
   tensors. A storage that has a reference of which nothing is known is left: who has it would read a null pointer.
3. What cannot be resized (memory that belongs to someone else) is left. All that is left is reported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..placement.tensors import Held, device_name, storage_of
from .census import Census
from .references import References

__all__ = ["Block", "blocks_of", "empty", "is_gone", "storage_in"]

_OUTSIDE = "it can be reached from outside of torch and Python's garbage collector"


@dataclass(slots=True)
class Block:
    """One storage.

    Attributes:
        path: the name of the first tensor that was met in it.
        device: e.g. "cuda:0".
        bytes: its size when it was found.
        weak: a weak reference.
        spared: why it must not be emptied, "" if it may.
        outside: whether that is because something outside can reach it.
        error: what torch said when it could not be.
        tensor: a tensor on it that is known to be left.
        holders: what is known to hold it, as `diffusers_quantfix.memory.holders` says it.
    """

    path: str
    device: str
    bytes: int
    weak: Any
    spared: str = ""
    outside: bool = False
    error: str = ""
    tensor: torch.Tensor | None = None
    holders: tuple[str, ...] = ()


def blocks_of(found: Iterable[Held]) -> dict[int, Block]:
    """The storages behind ``found`` by address; those without memory (meta, empty) are left out."""
    from torch.multiprocessing.reductions import StorageWeakRef

    blocks: dict[int, Block] = {}
    for held in found:
        tensor = held.tensor
        storage = storage_of(tensor)
        if storage is None or tensor.is_meta:
            continue
        key, size = storage._cdata, storage.nbytes()
        if not size or key in blocks:
            continue
        path = f"{held.component}.{held.name}" if held.name else held.component
        blocks[key] = Block(path, device_name(tensor.device), size, StorageWeakRef(storage))
    return blocks


def empty(
    blocks: dict[int, Block], to_cpu: dict[int, Block], census: Census, modules: Iterable[Any]
) -> dict[int, Block]:
    """Free the memory of ``blocks``, but for those that are spared; those that something outside can reach.

    Never raises.

    Args:
        blocks: what to empty.
        to_cpu: storages (of a scheduler, which can be used again) whose tensors are moved to the CPU, each in place.
        census: of now; its tensors are given up.
        modules: what is released.
    """
    wanted = {key: block for key, block in {**to_cpu, **blocks}.items() if not block.spared}
    # Held until all is done: the address of a storage that is gone could be given to another one.
    alive = {key: storage for key, block in wanted.items() if (storage := storage_in(block)) is not None}
    with _undisturbed():
        references = References(census, alive, modules)
        for key, why in references.spared.items():
            wanted[key].spared, wanted[key].outside = why, True
        _empty_tensors(references, wanted, to_cpu)
        left = {
            storage._cdata for tensor in references.tensors if (storage := storage_of(tensor)) is not None
        }
        hidden = references.hidden
        references.tensors.clear()
    for key, block in wanted.items():
        if block.spared:
            continue
        if key in left or key in hidden:
            block.spared, block.outside = _OUTSIDE, True
            continue
        if key in to_cpu:
            continue
        alive.pop(key, None)
        storage = storage_in(block)
        if storage is None or not storage.nbytes():
            continue
        # An autograd graph or a variable has it.
        alive[key] = storage
        del storage
        if references.reachable(key):
            block.spared, block.outside = _OUTSIDE, True
            continue
        try:
            alive[key].resize_(0)
        except Exception as error:
            block.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return {key: block for key, block in wanted.items() if block.outside}


def _empty_tensors(references: References, wanted: dict[int, Block], to_cpu: dict[int, Block]) -> None:
    counts = [tensor._use_count() for tensor in references.tensors]
    # Made before: making one lets other threads go on. Each its own, and on its device, where it costs nothing: a
    # pipeline asks its first component for the device to run on, and that may be a text encoder that was released.
    nothings = [torch.empty(0, dtype=tensor.dtype, device=tensor.device) for tensor in references.tensors]
    # Subclasses (GGUF) intercept even the setting of an attribute; the plain one is meant.
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for tensor, count, nothing in zip(references.tensors, counts, nothings, strict=True):
            key = references.keys[id(tensor)]
            if wanted[key].spared or id(tensor) in references.outside:
                continue
            # What cannot be given other data is found on its storage again, and is left.
            try:
                if key in to_cpu:
                    if tensor.device.type != "cpu":
                        tensor.data = tensor.detach().cpu()
                    continue
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
                # Since the references were counted a thread may have begun to compute with it.
                if tensor._use_count() == count:
                    if tensor.is_leaf and tensor.grad is not None:
                        tensor.grad = None
                    tensor.data = nothing
            except Exception:
                continue


def is_gone(block: Block) -> bool:
    """Whether the memory has been freed."""
    storage = storage_in(block)
    return storage is None or bool(storage.nbytes() == 0)


def storage_in(block: Block) -> Any:
    """The storage if it is still alive, or None."""
    return torch.UntypedStorage._new_with_weak_ptr(block.weak.cdata)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Other threads go on only where a call gives way: between a count of references and what is done on its ground."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(max(interval, 0.5))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
