"""Live objects of this process: pipelines, modules, tensors, tracebacks, found in one walk over the Python heap."""

from __future__ import annotations

import gc
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from itertools import chain, compress, starmap
from typing import Any

import torch

from ..placement.components import components_of, is_module, is_pipeline_type
from ..placement.released import released_message
from ..placement.tensors import nbytes, plain_tensors, storage_of
from ..weights.companions import companions
from .trees import bearing_modules

__all__ = ["Census", "all_but_plain", "device_tensors", "library_constants", "weights_of"]

# What `torch.nn.Module.__init__` gives every module.
_OF_EVERY_MODULE = {"_parameters", "_buffers", "_modules"}
_GRAPHS = tuple(
    getattr(module, name)
    for module, name in ((torch.cuda, "CUDAGraph"), (getattr(torch, "xpu", None), "XPUGraph"))
    if hasattr(module, name)
)


class Census:
    """A look at all live objects.

    Attributes:
        pipelines: live pipelines that are not released.
        modules: live modules.
        managers: diffusers' ComponentsManager objects.
        tracebacks: traceback objects, which keep the frames of failed calls alive.
        tensors: live tensors, but for wrappers of other tensors and the stand-ins of torch.compile.
        nodes: nodes of autograd graphs that Python has met.
        addresses: ctypes objects: they are, or point to, memory at an address.
        graphs: captured graphs of CUDA and XPU.
    """

    def __init__(self) -> None:
        # Frozen objects are invisible. They stay unfrozen: freezing all that is there now would make the cycles of
        # pipelines that are still in use immortal.
        gc.unfreeze()
        self.pipelines: list[Any] = []
        self.modules: list[Any] = []
        self.managers: list[Any] = []
        self.tracebacks: list[types.TracebackType] = []
        self.tensors: list[torch.Tensor] = []
        self.nodes: list[Any] = []
        self.addresses: list[Any] = []
        self.graphs: list[Any] = []
        self._users: dict[int, list[tuple[int, str]]] | None = None
        # By type: asking a lazy proxy for its class would wake it up.
        kinds = _Kinds()
        objects = all_but_plain()
        # Without a step of Python for each: nearly all of them are of no kind.
        for value in compress(objects, map(kinds.__getitem__, map(type, objects))):
            getattr(self, kinds[type(value)]).append(value)
        del objects
        # Another thread may be building one right now, or its constructor failed: it has no weights yet.
        self.modules[:] = [module for module in self.modules if vars(module).keys() >= _OF_EVERY_MODULE]
        self.pipelines[:] = [pipeline for pipeline in self.pipelines if not released_message(pipeline)]

    def users_of(self, modules: Iterable[Any], but: set[int]) -> list[str]:
        """The live pipelines that use any of ``modules``, without those whose ``id`` is in ``but``."""
        users: dict[int, str] = {}
        by_module = self._by_module()
        for module in modules if by_module else ():
            for pipeline, user in by_module.get(id(module), ()):
                if pipeline not in but:
                    users.setdefault(pipeline, user)
        return [users[id(pipeline)] for pipeline in self.pipelines if id(pipeline) in users]

    def other_owners(self, storages: Iterable[int], trees: set[int]) -> dict[int, tuple[str, torch.Tensor]]:
        """Of ``storages``, those that a live module outside of ``trees`` has too: its name, and the weight."""
        wanted = set(storages)
        owners: dict[int, tuple[str, torch.Tensor]] = {}
        for module in self.modules:
            if id(module) in trees:
                continue
            for name, tensor in _own_tensors(module):
                storage = storage_of(tensor)
                if storage is not None and storage._cdata in wanted:
                    why = f"also {name} of a live {type(module).__name__}"
                    owners.setdefault(storage._cdata, (why, tensor))
        return owners

    def _by_module(self) -> dict[int, list[tuple[int, str]]]:
        """``id`` of a module -> the pipelines that use it: their ``id``, and the component."""
        if self._users is None:
            self._users = {}
            for pipeline in self.pipelines:
                for name, component in components_of(pipeline, "release").items():
                    if is_module(component):
                        user = (id(pipeline), f"{type(pipeline).__name__}.{name}")
                        for module in bearing_modules(component):
                            self._users.setdefault(id(module), []).append(user)
        return self._users


_PLAIN = frozenset(
    (tuple, dict, list, set, frozenset, types.FunctionType, types.BuiltinFunctionType, types.CellType)
)


def all_but_plain() -> list[Any]:
    """All objects that the garbage collector knows, but for the millions that are of the types `_PLAIN`.

    In one call, so that no other thread goes on meanwhile: the objects include tuples that other threads are about to
    build, and those fail with SystemError while anybody else, like a list, refers to such a tuple.
    """
    objects: list[Any] = []
    # The iterators read the list once it is filled.
    plain = map(_PLAIN.__contains__, map(type, objects))
    return list(
        chain(
            filter(None, map(objects.extend, map(gc.get_objects, (None,)))),
            compress(objects, map(operator.not_, plain)),
            filter(None, starmap(objects.clear, ((),))),
        )
    )


class _Kinds(dict[type, str]):
    """Type -> the attribute of `Census` that has its objects, "" for none. Each type is asked once."""

    def __missing__(self, kind: type) -> str:
        self[kind] = _kind(kind)
        return self[kind]


def _kind(kind: type) -> str:
    """The attribute of `Census` that has the objects of a type, "" for none."""
    if kind is types.TracebackType:
        return "tracebacks"
    if issubclass(kind, torch.nn.Module):
        return "modules"
    if issubclass(kind, torch.Tensor):
        # A wrapper's inner tensors are met by themselves. Those that torch.compile keeps stand for tensors and have no
        # memory; the symbols in their shapes cannot even be compared any more once it is done.
        no_memory = hasattr(kind, "__tensor_flatten__") or kind.__module__.startswith("torch._subclasses.")
        return "" if no_memory else "tensors"
    if issubclass(kind, _GRAPHS):
        return "graphs"
    if any(base.__module__ == "_ctypes" for base in kind.__mro__) and not issubclass(kind, type):
        return "addresses"
    if issubclass(kind, torch.autograd.graph.Node):
        return "nodes"
    if is_pipeline_type(kind):
        return "pipelines"
    return "managers" if kind.__name__ == "ComponentsManager" else ""


def library_constants() -> dict[int, str]:
    """Storages of constants that libraries keep for all models: the code books of bitsandbytes."""
    functional = sys.modules.get("bitsandbytes.functional")
    constants: dict[int, str] = {}
    for name, tensor in getattr(functional, "name2qmap", {}).items():
        storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if storage is not None:
            constants[storage._cdata] = f"bitsandbytes.functional.name2qmap[{name!r}], which all models share"
    return constants


def weights_of(modules: Iterable[Any]) -> set[int]:
    """The storages of the weights of ``modules``, and those of library constants."""
    found = set(library_constants())
    for module in modules:
        for _, tensor in _own_tensors(module):
            storage = storage_of(tensor)
            if storage is not None:
                found.add(storage._cdata)
    return found


def device_tensors(tensors: Iterable[torch.Tensor], devices: set[str]) -> Iterator[torch.Tensor]:
    """Those of ``tensors`` that have memory on one of ``devices`` ("cuda:0")."""
    for value in tensors:
        if str(value.device) in devices and nbytes(value):
            yield value


def _own_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (module._parameters, module._buffers):
        for name, tensor in named.items():
            if isinstance(tensor, torch.Tensor):
                for inner, plain, _ in plain_tensors(name, tensor):
                    yield inner, plain
    for found in companions(module):
        yield found.name, found.tensor
