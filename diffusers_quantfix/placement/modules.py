"""The submodules of a module: for fast walks over tens of thousands of layers."""

from __future__ import annotations

from typing import Any

__all__ = ["containers_and_leaves", "modules_of", "named_modules"]


def named_modules(root: Any) -> list[tuple[str, Any]]:
    """As ``root.named_modules()``, but much faster: that passes each module through one generator per level."""
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((path, module))
        if module._modules:
            prefix = f"{path}." if path else ""
            children = [
                (f"{prefix}{name}", child)
                for name, child in list(module._modules.items())
                if child is not None
            ]
            pending += reversed(children)
    return found


def modules_of(root: Any) -> list[Any]:
    """As ``root.modules()``, but breadth first."""
    found, seen = [root], {id(root)}
    for module in found:
        if module._modules:
            for child in list(module._modules.values()):
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    found.append(child)
    return found


def containers_and_leaves(root: Any) -> tuple[list[Any], list[Any]]:
    """The modules of ``root`` that have children, each once, and the leaves, once per place where they are used."""
    containers: list[Any] = []
    leaves: list[Any] = []
    seen: set[int] = set()
    level = [root]
    while level:
        inner = [module for module in level if module._modules]
        if len(inner) < len(level):
            leaves += [module for module in level if not module._modules]
        inner = [module for module in inner if not (id(module) in seen or seen.add(id(module)))]  # type: ignore[func-returns-value]
        containers += inner
        level = [child for module in inner for child in list(module._modules.values()) if child is not None]
    return containers, leaves
