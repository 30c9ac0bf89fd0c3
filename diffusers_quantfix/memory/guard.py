"""Makes every later use of a released object raise one clear error.

Modules get instance attributes that shadow the methods that use their weights. A pipeline is called through its class,
so its class is replaced by a subclass; ``isinstance`` still holds. torch is not imported here.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from ..engine.classes import attributes, class_name, is_a, module_name, mro, namespace
from ..engine.interruptions import heed_interruption
from ..placement.released import MARK, ReleasedError

__all__ = ["guard_module", "guard_pipeline"]

# Methods of every module that compute with the weights, move them or return them.
_OF_MODULES: tuple[str, ...] = (
    *("forward", "_apply", "to", "to_empty", "cuda", "cpu", "xpu"),
    *("half", "float", "double", "bfloat16", "type", "state_dict", "load_state_dict", "compile"),
)
# Prefixes of further methods of a component's own class.
_PREFIXES: tuple[str, ...] = (
    *("decode", "dequantize", "disable_", "enable_", "encode", "fuse_", "generate", "load_", "merge_"),
    *("push_to", "quantize", "save_", "tiled_", "unfuse_", "unload_", "unmerge_"),
)


class _Refusal:
    """Replaces a method. A class, not a closure: it can be copied and pickled with its module."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ReleasedError(self.message)


def _describe() -> str:
    return "released"


def guard_module(root: Any, modules: Iterable[Any], message: str) -> None:
    """Make every use of the weights of ``root`` and of ``modules`` below it raise `ReleasedError`."""
    refusal = _Refusal(message)
    shadow: dict[str, Any] = {
        MARK: message,
        "extra_repr": _describe,  # many classes read their weights here
        "_compiled_call_impl": None,
        **dict.fromkeys(_OF_MODULES, refusal),
    }
    own = {name: refusal for name in _methods(type(root)) if name.startswith(_PREFIXES)}
    for module in modules:
        (namespace(module) or {}).update(shadow | own if module is root else shadow)


def guard_pipeline(pipeline: Any, message: str) -> None:
    """Make every public method of ``pipeline``, and calling it, raise `ReleasedError`."""
    cls = type(pipeline)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ReleasedError(message)

    def describe(self: Any) -> str:
        return f"<{message}>"

    body: dict[str, Any] = dict.fromkeys(_methods(cls), refuse)
    body.update(__call__=refuse, __repr__=describe, __doc__=message)
    body.update(__module__=module_name(cls), __qualname__=class_name(cls))
    # If a class forbids subclasses or has an exotic layout, the pipeline keeps it; its components refuse anyway.
    try:
        object.__setattr__(pipeline, "__class__", _subclass(cls, body))
    except Exception as error:
        heed_interruption(error)
    (namespace(pipeline) or {})[MARK] = message  # last: after an interruption it is guarded again


class _Quiet:
    """Comes before the program's classes, so that their ``__init_subclass__`` is not called."""

    def __init_subclass__(cls) -> None:
        pass


def _subclass(cls: type, body: dict[str, Any]) -> type:
    """A subclass of ``cls`` of the same name, made without the program's ``__init_subclass__`` and metaclass.

    They often register each new class by its name, where the program would then find this one instead of ``cls``.
    """
    metaclass: Any = type(cls)
    new: Any = ABCMeta.__new__ if issubclass(metaclass, ABCMeta) else type.__new__
    subclass: type = new(metaclass, class_name(cls), (_Quiet, cls), body)
    return subclass


def _methods(cls: type) -> list[str]:
    """The names of the public methods of ``cls``, without properties, class methods and static methods."""
    found: dict[str, Any] = {}
    for base in mro(cls):
        for name, value in list(attributes(base).items()):
            found.setdefault(name, value)
    return [
        name
        for name, value in found.items()
        if is_a(name, str) and not name.startswith("_") and is_a(value, FunctionType)
    ]
