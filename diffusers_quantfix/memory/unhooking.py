"""Removes offload hooks from released modules without detaching them properly, which would onload the weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..engine.classes import items_of, namespace
from ..offloading.hooks import accelerate_hooks, take_off_child_hooks
from ..placement.components import is_module
from .census import Census

__all__ = ["forget_in_managers", "strip", "unlink"]

_OF_MODULES = ("_hf_hook", "_old_forward", "_diffusers_hook")


def strip(modules: Iterable[Any]) -> None:
    """Remove the hooks of accelerate and diffusers from ``modules``; nothing is moved."""
    for module in modules:
        held = namespace(module) or {}
        hooks: Any = (namespace(held.get("_diffusers_hook")) or {}).get("hooks")
        for hook in list(hooks.values()) if issubclass(type(hooks), dict) else ():
            take_off_child_hooks(hook)
        for name in _OF_MODULES:
            held.pop(name, None)


def unlink(root: Any, released: set[int]) -> None:
    """Make the model offload hook of a live component forget released ones, which it would move to the CPU."""
    for hook in accelerate_hooks(root):
        held = (
            namespace(hook) or {}
        )  # the program may have hooks of its own, in which these names mean something else
        if _model_of(held.get("prev_module_hook")) in released:
            held["prev_module_hook"] = None
        _drop(held, "other_hooks", released)


def forget_in_managers(census: Census, released: set[int]) -> None:
    """Drop released components from diffusers' ComponentsManager, which would return and offload them."""
    for manager in census.managers:
        held = namespace(manager) or {}
        components: Any = held.get("components")
        if not issubclass(type(components), dict):
            continue  # one under construction
        for key, component in items_of(components):
            if id(component) in released:
                components.pop(key, None)
                held.get("added_time", {}).pop(key, None)
                for names in list(held.get("collections", {}).values()):
                    names.discard(key)
            elif is_module(component):
                unlink(component, released)
        _drop(held, "model_hooks", released)


def _drop(held: dict[str, Any], name: str, released: set[int]) -> None:
    """Remove the hooks of released models from a list of hooks."""
    hooks: Any = held.get(name)
    if issubclass(type(hooks), list):
        left = [hook for hook in list(hooks) if _model_of(hook) not in released]
        if len(left) < len(hooks):
            held[name] = left


def _model_of(hook: Any) -> int:
    """The ``id`` of the model of a hook."""
    return id((namespace(hook) or {}).get("model"))
