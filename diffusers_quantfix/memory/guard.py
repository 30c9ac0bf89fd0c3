"""What is released says so: every later use raises one clear error.

Modules get instance attributes that shadow what uses their weights. A pipeline is called through its class, so it
gets a subclass of its own class; ``isinstance`` goes on to hold. torch is not imported here.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

__all__ = ["ReleasedError", "guard_module", "guard_pipeline", "released_message"]

_MARK = "_diffusers_quantfix_released"
# Of every module, inner ones as well: what computes with the weights, moves them or hands them out.
_OF_MODULES: tuple[str, ...] = (
    *("forward", "_apply", "to", "to_empty", "cuda", "cpu", "xpu"),
    *("half", "float", "double", "bfloat16", "type", "state_dict", "load_state_dict", "compile"),
)
# Of a component, whatever its class calls so.
_PREFIXES: tuple[str, ...] = (
    *("decode", "dequantize", "disable_", "enable_", "encode", "fuse_", "generate", "load_", "merge_"),
    *("push_to", "quantize", "save_", "tiled_", "unfuse_", "unload_", "unmerge_"),
)


class ReleasedError(RuntimeError):
    """A pipeline or model was used after `diffusers_quantfix.release` freed its memory."""


class _Refusal:
    """Stands where a method was. A class, not a closure: it can be copied and pickled with its module."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ReleasedError(self.message)


def released_message(value: Any) -> str:
    """The sentence that says that ``value`` was released, "" if it was not."""
    return str(getattr(value, "__dict__", {}).get(_MARK, ""))


def message_for(name: str) -> str:
    """The sentence for something called ``name``."""
    return f"{name} was released by diffusers_quantfix.release() and holds no weights any more; load it again to use it"


def guard_module(root: Any, message: str) -> None:
    """Make every use of the weights of ``root`` and its submodules raise `ReleasedError`. Never raises."""
    from ..placement.tensors import bearing_modules

    for module in bearing_modules(root):
        held = vars(module)
        held[_MARK] = message
        held["_compiled_call_impl"] = None
        for name in _OF_MODULES:
            held[name] = _Refusal(message)
    for name in _methods(type(root)):
        if name.startswith(_PREFIXES):
            vars(root)[name] = _Refusal(message)


def guard_pipeline(pipeline: Any, message: str) -> None:
    """Make every public method of ``pipeline``, and calling it, raise `ReleasedError`. Never raises."""
    vars(pipeline)[_MARK] = message
    cls = type(pipeline)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ReleasedError(message)

    def describe(self: Any) -> str:
        return f"<{message}>"

    body: dict[str, Any] = dict.fromkeys(_methods(cls), refuse)
    body.update(__call__=refuse, __repr__=describe, __doc__=message)
    body.update(__module__=cls.__module__, __qualname__=cls.__qualname__)
    # A class that forbids subclasses or exotic layouts keeps its own; its components refuse all the same.
    with contextlib.suppress(Exception):
        metaclass: Any = type(cls)
        object.__setattr__(pipeline, "__class__", metaclass(cls.__name__, (cls,), body))


def _methods(cls: type) -> list[str]:
    """The public methods of ``cls``; no properties, class methods or static methods."""
    found = []
    for name in dir(cls):
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(cls, name)):
            found.append(name)
    return found
