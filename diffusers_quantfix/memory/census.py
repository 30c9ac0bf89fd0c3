"""Who is alive in this process: pipelines, modules, tensors, tracebacks, found through the garbage collector."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..placement.components import components_of, is_module, is_pipeline
from ..placement.tensors import bearing_modules, nbytes, plain_tensors, storage_of
from ..weights.companions import companions
from .guard import released_message

__all__ = ["Census", "device_tensors", "library_constants", "tensors_with_storage", "weights_of_live_modules"]


class Census:
    """A look at all live objects.

    Attributes:
        pipelines: live pipelines that are not released.
        modules: live modules.
        managers: diffusers' ComponentsManager objects.
        tracebacks: traceback objects, which keep the frames of failed calls alive.
    """

    def __init__(self, collect: bool = True) -> None:
        # Frozen objects are invisible. They stay unfrozen: freezing all that is there now would make the cycles of
        # pipelines that are still in use immortal.
        gc.unfreeze()
        if collect:
            gc.collect()
        self.pipelines: list[Any] = []
        self.modules: list[Any] = []
        self.managers: list[Any] = []
        self.tracebacks: list[types.TracebackType] = []
        collected: dict[str, list[Any]] = {
            "pipeline": self.pipelines,
            "module": self.modules,
            "manager": self.managers,
            "traceback": self.tracebacks,
        }
        kinds: dict[type, str] = {}  # there are half a million objects, and few types
        for value in gc.get_objects():
            kind = kinds.get(type(value))
            if kind is None:
                kind = kinds[type(value)] = _kind(value)
            if kind and not (kind == "pipeline" and released_message(value)):
                collected[kind].append(value)

    def users_of(self, root: Any, but: set[int]) -> list[str]:
        """The live pipelines that use any module of the tree of ``root``, without those whose ``id`` is in ``but``."""
        tree = {id(module) for module in bearing_modules(root)}
        users = []
        for pipeline in self.pipelines:
            if id(pipeline) in but:
                continue
            for name, component in components_of(pipeline, "release").items():
                if is_module(component) and any(id(m) in tree for m in bearing_modules(component)):
                    users.append(f"{type(pipeline).__name__}.{name}")
                    break
        return users

    def other_owners(self, storages: Iterable[int], trees: set[int]) -> dict[int, str]:
        """Of ``storages``, those that a live module outside of ``trees`` has as a weight too, and its name."""
        wanted = set(storages)
        owners: dict[int, str] = {}
        for module in self.modules:
            if id(module) in trees:
                continue
            for name, tensor in _own_tensors(module):
                storage = storage_of(tensor)
                if storage is not None and storage._cdata in wanted:
                    owners.setdefault(storage._cdata, f"also {name} of a live {type(module).__name__}")
        return owners


def _kind(value: Any) -> str:
    if type(value) is types.TracebackType:
        return "traceback"
    if is_module(value):
        return "module"
    if is_pipeline(value):
        return "pipeline"
    return "manager" if type(value).__name__ == "ComponentsManager" else ""


def library_constants() -> dict[int, str]:
    """Storages of constants that libraries keep for all models: the code books of bitsandbytes."""
    import sys

    functional = sys.modules.get("bitsandbytes.functional")
    constants: dict[int, str] = {}
    for name, tensor in getattr(functional, "name2qmap", {}).items():
        storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if storage is not None:
            constants[storage._cdata] = f"bitsandbytes.functional.name2qmap[{name!r}], which all models share"
    return constants


def weights_of_live_modules() -> set[int]:
    """The storages of the weights of all live modules, and those of library constants."""
    found = set(library_constants())
    for module in Census(collect=False).modules:
        for _, tensor in _own_tensors(module):
            storage = storage_of(tensor)
            if storage is not None:
                found.add(storage._cdata)
    return found


def tensors_with_storage(storages: set[int]) -> Iterator[torch.Tensor]:
    """Every live tensor object, wherever it is, whose memory is one of ``storages``."""
    for value in _tensors():
        storage = storage_of(value)
        if storage is not None and storage._cdata in storages:
            yield value


def device_tensors(devices: set[str]) -> Iterator[torch.Tensor]:
    """Every live plain tensor with memory on one of ``devices`` ("cuda:0")."""
    for value in _tensors():
        if str(value.device) in devices and nbytes(value):
            yield value


def _tensors() -> Iterator[torch.Tensor]:
    plain: dict[type, bool] = {}
    for value in gc.get_objects():
        # By type: asking a lazy proxy for its class would wake it up. A wrapper's inner tensors come by themselves.
        kind = type(value)
        if kind not in plain:
            plain[kind] = issubclass(kind, torch.Tensor) and not hasattr(kind, "__tensor_flatten__")
        if plain[kind]:
            yield value


def _own_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (module._parameters, module._buffers):
        for name, tensor in named.items():
            if isinstance(tensor, torch.Tensor):
                for inner, plain, _ in plain_tensors(name, tensor):
                    yield inner, plain
    for found in companions(module):
        yield found.name, found.tensor
