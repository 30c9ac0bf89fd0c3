"""Live objects of this process: pipelines, modules and tensors, found in one walk over the Python heap.

The objects belong to other code, and another thread may still be constructing them: no attribute access runs on them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

import torch

from ..engine.classes import class_name, defines, is_a, module_name, mro, namespace, package_name
from ..engine.heap import PLAIN, objects_of
from ..engine.interruptions import heed_interruption
from ..placement.components import components_of, is_module, is_pipeline_type
from ..placement.released import released_message
from ..placement.tensors import plain_tensors, storage_of
from ..weights.companions import companions
from .trees import is_whole, readable_modules

__all__ = ["Census", "has_no_memory", "library_constants"]

# The classes of captured graphs, and the device types whose memory they read.
_GRAPHS = {
    getattr(module, name): module.__name__.rpartition(".")[2]
    for module, name in ((torch.cuda, "CUDAGraph"), (getattr(torch, "xpu", None), "XPUGraph"))
    if module is not None and hasattr(module, name)
}


class Census:
    """All live objects of certain types at one moment, except those hidden by ``gc.freeze()``.

    Attributes:
        pipelines: live pipelines that are not released.
        modules: live modules, except those whose constructor has not finished: they have no weights yet.
        managers: diffusers' ComponentsManager objects.
        tensors: live tensors, except wrappers of other tensors and fake tensors of torch.compile.
        graphs: captured graphs of CUDA and XPU.
    """

    def __init__(self) -> None:
        self.pipelines: list[Any] = []
        self.modules: list[Any] = []
        self.managers: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.graphs: list[Any] = []
        self._users: dict[int, list[tuple[int, str]]] | None = None
        # By id: a metaclass may make its classes unhashable. Loops in C: nearly all objects are of no interest. Each
        # type is read once: other threads may change it.
        objects = objects_of(gc.get_objects, but=PLAIN)
        types = list(map(type, objects))
        kinds = {key: _kind(kind) for key, kind in dict(zip(map(id, types), types, strict=True)).items()}
        names = list(map(kinds.__getitem__, map(id, types)))
        for value, name in zip(compress(objects, names), filter(None, names), strict=True):
            getattr(self, name).append(value)
        del objects
        self._visible = {*map(id, self.modules), *map(id, self.pipelines)}
        self.modules[:] = filter(is_whole, self.modules)
        self.pipelines[:] = [pipeline for pipeline in self.pipelines if not released_message(pipeline)]

    def users_of(self, modules: Iterable[Any], but: set[int]) -> list[str]:
        """The live pipelines that use any of ``modules``, e.g. "FluxPipeline.vae", without the ids in ``but``."""
        users: dict[int, str] = {}
        by_module = self._by_module()
        for module in modules if by_module else ():
            for pipeline, user in by_module.get(id(module), ()):
                if pipeline not in but:
                    users.setdefault(pipeline, user)
        return [users[id(pipeline)] for pipeline in self.pipelines if id(pipeline) in users]

    def sees(self, value: Any) -> bool:
        """False if ``gc.freeze()`` hides the module or pipeline, and perhaps also a pipeline that uses the same."""
        return id(value) in self._visible

    def weights(self) -> set[int]:
        """The storages (``_cdata``) of the weights of all live modules and of library constants."""
        found = set(library_constants())
        for module in self.modules:
            for tensor in _weights_of(module):
                storage = storage_of(tensor)
                if storage is not None:
                    found.add(storage._cdata)
        return found

    def captured(self) -> set[str]:
        """The device types ("cuda") whose memory a captured graph may read."""
        found: set[str] = set()
        for graph in self.graphs:
            try:
                graph.pool()
            except Exception as error:  # not captured yet, or reset
                heed_interruption(error)
                continue
            found |= {kind for cls, kind in _GRAPHS.items() if is_a(graph, cls)}
        return found

    def _by_module(self) -> dict[int, list[tuple[int, str]]]:
        """``id`` of a module -> the pipelines that use it: their ``id``, and the component."""
        if self._users is None:
            self._users = {}
            for pipeline in self.pipelines:
                for name, component in components_of(pipeline, "release").items():
                    if is_module(component) and is_whole(component):
                        user = (id(pipeline), f"{class_name(type(pipeline))}.{name}")
                        for module in readable_modules(component):
                            self._users.setdefault(id(module), []).append(user)
        return self._users


def _kind(kind: type) -> str:
    """The attribute of `Census` for objects of a type, or ""."""
    if issubclass(kind, torch.nn.Module):
        return "modules"
    if issubclass(kind, torch.Tensor):
        return "" if has_no_memory(kind) else "tensors"
    if issubclass(kind, tuple(_GRAPHS)):
        return "graphs"
    if is_pipeline_type(kind):
        return "pipelines"
    return "managers" if any(map(_is_manager, mro(kind))) else ""


def _is_manager(cls: type) -> bool:
    # A program may have its own class of this name, which stays as it is.
    return class_name(cls) == "ComponentsManager" and package_name(cls) == "diffusers"


def has_no_memory(kind: type) -> bool:
    """Whether tensors of a type have no memory of their own: wrappers and fake tensors.

    A wrapper's inner tensors are found separately. A fake tensor's shape has symbols that cannot even be compared after
    torch.compile has finished.
    """
    fake = any(module_name(cls).startswith("torch._subclasses.") for cls in mro(kind))
    return fake or defines(kind, "__tensor_flatten__")


def library_constants() -> dict[int, str]:
    """Storages of constants that all models share (the code books of bitsandbytes) -> a description."""
    functional = sys.modules.get("bitsandbytes.functional")
    constants: dict[int, str] = {}
    for name, tensor in list(getattr(functional, "name2qmap", {}).items()):
        storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if storage is not None:
            constants[storage._cdata] = f"bitsandbytes.functional.name2qmap[{name!r}], which all models share"
    return constants


def _weights_of(module: Any) -> Iterator[torch.Tensor]:
    held = namespace(module) or {}
    for named in (held["_parameters"], held["_buffers"]):
        for tensor in list(named.values()):
            if is_a(tensor, torch.Tensor):
                for _, plain, _ in plain_tensors("", tensor):
                    yield plain
    for found in companions(module):
        yield found.tensor
