"""The submodules of a root that have tensors, found in linear time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..engine.classes import is_a, namespace
from ..engine.interruptions import heed_interruption
from ..placement.components import is_module
from ..placement.modules import named_modules
from ..weights.companions import companions

__all__ = ["bearing_modules", "is_whole", "readable_modules"]

# What `torch.nn.Module.__init__` gives every module.
_OF_EVERY_MODULE = ("_parameters", "_buffers", "_modules")


def is_whole(module: Any) -> bool:
    """Whether a module is initialized: its constructor may have failed, or may be running in another thread."""
    held = namespace(module) or {}
    return all(held.get(name) is not None for name in _OF_EVERY_MODULE)


def bearing_modules(root: Any) -> list[Any]:
    """``root`` and its submodules that have tensors in themselves or below, in the order of ``modules()``.

    Other submodules may be shared: diffusers before 0.33 has one ``nn.SiLU()`` for all models of the process.
    """
    modules = [module for _, module in named_modules(root)]
    bearing = _with_ancestors([module for module in modules if _bears(module)], modules)
    return [module for module in modules if module is root or id(module) in bearing]


def readable_modules(root: Any) -> list[Any]:
    """`bearing_modules` of a module that may have parts that are no modules, half made, or raise: then all the whole
    modules that are found in it."""
    try:
        return bearing_modules(root)
    except Exception as error:
        heed_interruption(error)
    found: dict[int, Any] = {}
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) not in found and is_module(module) and is_whole(module):
            found[id(module)] = module
            children: Any = (namespace(module) or {})["_modules"]
            pending += dict.values(children) if is_a(children, dict) else ()
    return list(found.values())


def _with_ancestors(starts: Iterable[Any], modules: Iterable[Any]) -> set[int]:
    """The ``id`` of ``starts`` and of all ``modules`` above them."""
    parents: dict[int, list[int]] = {}
    for module in modules:
        for child in list(module._modules.values()):
            if child is not None:
                parents.setdefault(id(child), []).append(id(module))
    found: set[int] = set()
    pending = [id(module) for module in starts]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending += parents.get(current, ())
    return found


def _bears(module: Any) -> bool:
    for named in (module._parameters, module._buffers):
        for tensor in list(named.values()):
            if tensor is not None:
                return True
    return next(companions(module), None) is not None
