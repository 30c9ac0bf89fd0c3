"""The modules below a root that have tensors, found in time that grows with their number only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..placement.modules import named_modules
from ..weights.companions import companions

__all__ = ["bearing_modules", "with_ancestors"]


def bearing_modules(root: Any) -> list[Any]:
    """``root``, and the modules below it that have tensors themselves or further down, in the order of ``modules()``.

    The rest may belong to everyone: diffusers before 0.33 has one ``nn.SiLU()`` for all models of the process.
    """
    modules = [module for _, module in named_modules(root)]
    bearing = with_ancestors([module for module in modules if _bears(module)], modules)
    return [module for module in modules if module is root or id(module) in bearing]


def with_ancestors(starts: Iterable[Any], modules: Iterable[Any]) -> set[int]:
    """``id`` of ``starts`` and of those of ``modules`` that have one of them anywhere below."""
    parents: dict[int, list[int]] = {}
    for module in modules:
        for child in vars(module).get("_modules", {}).values():
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
        for tensor in named.values():
            if tensor is not None:
                return True
    return next(companions(module), None) is not None
