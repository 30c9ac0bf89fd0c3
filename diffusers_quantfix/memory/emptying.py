"""Removes the tensors from modules; nothing but these modules is changed.

The tensors themselves are not changed. Anything else that has one (a variable, an optimizer, a NumPy array, an autograd
graph, a running kernel) can still use it, and keeps its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.classes import attributes, items_of, namespace
from ..engine.interruptions import heed_interruption
from ..placement.released import MARK
from ..placement.tensors import Held, device_name, held_in, storage_of

__all__ = ["Block", "blocks_of", "give_up", "is_gone", "storage_in"]

_OF_MODULES = frozenset({*vars(torch.nn.Module()), MARK})
_REGISTERED = ("_parameters", "_buffers")


@dataclass(slots=True)
class Block:
    """One storage.

    Attributes:
        path: the name of the first tensor found in it.
        device: e.g. "cuda:0".
        bytes: its size when it was found.
        weak: a weak reference to it.
    """

    path: str
    device: str
    bytes: int
    weak: Any


def blocks_of(found: Iterable[Held]) -> dict[int, Block]:
    """``_cdata`` -> storage of the tensors in ``found``, without storages that have no memory (meta, empty)."""
    from torch.multiprocessing.reductions import StorageWeakRef

    blocks: dict[int, Block] = {}
    for held in found:
        storage = storage_of(held.tensor)
        if storage is None or storage.device.type == "meta":
            continue
        key, size = storage._cdata, storage.nbytes()
        if not size or key in blocks:
            continue
        path = f"{held.component}.{held.name}" if held.name else held.component
        blocks[key] = Block(path, device_name(storage.device), size, StorageWeakRef(storage))
    return blocks


def is_gone(block: Block) -> bool:
    """Whether the memory has been freed."""
    storage = storage_in(block)
    return storage is None or bool(storage.nbytes() == 0)


def storage_in(block: Block) -> Any:
    """The storage if it is still alive, or None."""
    return torch.UntypedStorage._new_with_weak_ptr(block.weak.cdata)


def give_up(root: Any, modules: Iterable[Any], captured: set[str]) -> None:
    """Remove all tensors, and all attributes that contain tensors, from ``modules``.

    They are not replaced, so a thread inside a module gets AttributeError. With an empty weight a kernel could read
    past its end, or a layer could compute without its bias.

    Args:
        root: a released model. It gets one empty parameter: a pipeline uses the device of its first component, which
            may be a released text encoder.
        modules: ``root`` and its submodules that have tensors.
        captured: the device types whose tensors stay, since a captured graph may read them.
    """
    first: Any = None
    for module in modules:
        held = namespace(module) or {}
        for which in _REGISTERED:
            named: Any = held.get(which)
            if not issubclass(type(named), dict):
                held[which] = {}  # a TorchScript module: its tensors are in `_c`
                held.pop("_c", None)
                continue
            # A shallow copy of the module has the same dict, and keeps its tensors.
            held[which] = rest = {}
            for name, tensor in items_of(named):
                if not _goes(tensor, captured):
                    rest[name] = tensor
                elif first is None or not first.is_floating_point():
                    first = _empty_like(tensor)
        for name, value in items_of(held):
            if name not in _OF_MODULES and _goes(value, captured):
                held.pop(name, None)
    parameters: Any = (namespace(root) or {}).get("_parameters")
    if first is not None and issubclass(type(parameters), dict):
        parameters["released"] = first


def _goes(value: Any, captured: set[str]) -> bool:
    """Whether ``value`` contains a tensor, and none that has to stay."""
    devices = {_property(tensor, "device", torch.device("cpu")).type for tensor in held_in(value)}
    return bool(devices) and devices.isdisjoint(captured)


def _empty_like(tensor: Any) -> torch.nn.Parameter:
    dtype = _property(tensor, "dtype", torch.float32)
    device = _property(tensor, "device", torch.device("cpu"))
    return torch.nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)


def _property(tensor: Any, name: str, otherwise: Any) -> Any:
    """A property of a tensor, read without a subclass's own code."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return attributes(torch._C.TensorBase)[name].__get__(tensor)
    except Exception as error:  # raised by a tensor subclass
        heed_interruption(error)
        return otherwise
