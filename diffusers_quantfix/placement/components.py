"""The arguments that `audit`, `release` and `track` accept, and the components in them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from ..engine.classes import class_name, is_a, items_of, mro, namespace

__all__ = [
    "accelerators_first",
    "components_of",
    "is_module",
    "is_pipeline",
    "is_pipeline_type",
    "is_script",
    "readable_name",
]

# By name: recognising a pipeline must not import diffusers. "Pipeline" is that of transformers.
_PIPELINES = frozenset({"DiffusionPipeline", "ModularPipeline", "Pipeline"})
_MANAGERS = frozenset({"ComponentsManager"})
_ACCEPTED = "a diffusers pipeline, a torch.nn.Module or a dict of components"


def components_of(target: Any, caller: str) -> dict[str, Any]:
    """The components of ``target`` by name, including those that are None or not models (schedulers, tokenizers).

    Args:
        target: a diffusers pipeline (also a modular one), a ``ComponentsManager``, a ``torch.nn.Module`` (named by its
            class), or a mapping from names to components.
        caller: the public function that was called, for the error message.

    Raises:
        TypeError: ``target`` is none of these.
    """
    if is_module(target):
        return {type(target).__name__: target}
    if is_pipeline(target):
        # Not `pipe.components`: it raises for an incomplete pipeline, and does not include the pipelines inside a
        # combined one or attributes that the user added.
        return dict(_of_pipeline("", target, set()))
    if _is_named(type(target), _MANAGERS):
        return dict(getattr(target, "components", {}))
    if isinstance(target, Mapping):
        strange = [key for key in target if not isinstance(key, str)]
        if strange:
            raise TypeError(f"{caller}() takes a dict from names to components, {strange[0]!r} is no name")
        return dict(target)
    what = (
        f"the class {target.__name__}"
        if isinstance(target, type)
        else f"an object of type {type(target).__name__}"
    )
    raise TypeError(f"{caller}() takes {_ACCEPTED}, not {what}")


def is_module(value: Any) -> bool:
    """Whether ``value`` is a ``torch.nn.Module``, without importing torch."""
    torch = sys.modules.get("torch")
    # Check the type only: isinstance could load a lazy proxy.
    return torch is not None and issubclass(type(value), torch.nn.Module)


def is_script(module: Any) -> bool:
    """Whether a module is a TorchScript module: its tensors are in C++, and it accepts no hooks."""
    jit = sys.modules.get("torch.jit")
    return jit is not None and issubclass(type(module), jit.ScriptModule)


def is_pipeline(value: Any) -> bool:
    """Whether ``value`` is a pipeline of diffusers or transformers, without importing them."""
    return is_pipeline_type(type(value))


def is_pipeline_type(kind: type) -> bool:
    """Whether objects of type ``kind`` are pipelines of diffusers or transformers."""
    return _is_named(kind, _PIPELINES)


def accelerators_first(device: str) -> tuple[bool, str]:
    """The sort key of a device ("cuda:0") for display: the CPU last."""
    return device == "cpu", device


def readable_name(target: Any) -> str:
    """A name for ``target`` in messages: the class of a pipeline or model, "dict of components" for a mapping."""
    # A metaclass may make the class of a module unhashable, which the check for a mapping does not accept.
    known = is_module(target) or is_pipeline(target)
    return class_name(type(target)) if known or not isinstance(target, Mapping) else "dict of components"


def _of_pipeline(prefix: str, pipeline: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(pipeline))
    for name, value in items_of(namespace(pipeline) or {}):
        if type(name) is not str:
            continue
        if not is_pipeline(value):
            if _may_be_component(name, value):
                yield prefix + name, value
        elif id(value) not in seen:
            yield from _of_pipeline(f"{prefix}{name}.", value, seen)


def _may_be_component(name: str, value: Any) -> bool:
    # Other attributes of a pipeline are configuration, but private attributes may hold a model or tensors.
    if is_a(value, (str, bytes, int, float, type, FunctionType, ModuleType)):
        return False
    return value is not None or not name.startswith("_")


def _is_named(kind: type, names: frozenset[str]) -> bool:
    # Callers pass type(value), not value.__class__, which could load a lazy proxy.
    return not issubclass(kind, type) and any(class_name(cls) in names for cls in mro(kind))
