"""Makes every later use of what is released raise one clear error.

Modules get instance attributes that shadow what uses their weights. A pipeline is called through its class, so it
gets a subclass of its own class; ``isinstance`` goes on to hold. torch is not imported here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

from ..placement.released import MARK, ReleasedError

__all__ = ["Guards"]

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


class _Refusal:
    """Stands where a method was. A class, not a closure: it can be copied and pickled with its module."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ReleasedError(self.message)


class Guards:
    """The guards of one release; they can be taken back as long as nothing is emptied."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._classes: list[tuple[Any, type]] = []

    def guard_module(self, root: Any, modules: Iterable[Any], message: str) -> None:
        """Make every use of the weights of ``root`` and of ``modules`` below it raise `ReleasedError`. Never raises."""
        refusal = _Refusal(message)
        shadow = {MARK: message, "_compiled_call_impl": None, **dict.fromkeys(_OF_MODULES, refusal)}
        own = {name: refusal for name in _methods(type(root)) if name.startswith(_PREFIXES)}
        for module in modules:
            self._shadow(vars(module), shadow | own if module is root else shadow)

    def guard_pipeline(self, pipeline: Any, message: str) -> None:
        """Make every public method of ``pipeline``, and calling it, raise `ReleasedError`. Never raises."""
        self._shadow(vars(pipeline), {MARK: message})
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
            self._classes.append((pipeline, cls))

    def undo(self) -> None:
        """Take all guards back."""
        for held, shadow, before in self._before:
            for name in shadow:
                held.pop(name, None)
            held.update(before)
        for pipeline, cls in self._classes:
            object.__setattr__(pipeline, "__class__", cls)

    def _shadow(self, held: dict[str, Any], shadow: dict[str, Any]) -> None:
        self._before.append((held, shadow, {name: held[name] for name in held.keys() & shadow.keys()}))
        held.update(shadow)


def _methods(cls: type) -> list[str]:
    """The public methods of ``cls``; no properties, class methods or static methods."""
    found = []
    for name in dir(cls):
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(cls, name)):
            found.append(name)
    return found
