"""Who else is inside of what is to be released: other threads, found by the functions that they are in."""

from __future__ import annotations

import inspect
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..placement.components import is_module
from ..placement.released import InUseError, ReleasedError, released_message
from ..placement.tensors import storage_of
from .frames import locals_of, running

__all__ = ["Gates", "Inside"]

_TICK = 0.005
_BACKWARD = frozenset({"_engine_run_backward", "backward", "grad"})
_AUTOGRAD = ("torch.autograd", "torch._tensor")
# Functions of these work for a caller: a weight among their variables is being used.
_LIBRARIES = frozenset(
    {"torch", "accelerate", "bitsandbytes", "diffusers", "optimum", "peft", "torchao", "transformers"}
)


class Inside:
    """Says which other threads are inside of some modules and pipelines.

    Inside is a thread that is in a method of one of them, or of a module that contains one (a wrapper, a compiled
    module), in a wrapper of a library around one, or in a library's or compiled function that has one of the weights
    among its variables (a replica of DataParallel, a compiled function). And one that is in a backward pass, whatever
    its graph is of: torch runs it without functions of Python.

    Not noticed is a thread that is not a thread of Python's, and one in C code that was called with a weight by a
    function of the user's own. What these compute with is left by the count of references instead.
    """

    def __init__(self, owners: set[int], storages: set[int]) -> None:
        self._owners = owners
        self._storages = storages

    def threads(self, but: Iterable[int] = ()) -> dict[int, tuple[types.FrameType, str]]:
        """The threads (``ident``) inside now, but for the calling one: where they went in, and where they are."""
        others = {threading.get_ident(), *but}
        chains = running()
        return {
            ident: where
            for ident in chains.keys() - others
            if (where := self.of(chains[ident], ident)) is not None
        }

    def of(self, chain: list[types.FrameType], ident: int) -> tuple[types.FrameType, str] | None:
        """As `threads`, of the frames of one thread."""
        entry: types.FrameType | None = None
        text = ""
        for frame in chain:
            if why := self._is_inside(frame):
                entry = frame
                code = frame.f_code
                place = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
                text = text or f"thread {_name(ident)!r} is {why} ({place})"
        return None if entry is None else (entry, text)

    def _is_inside(self, frame: types.FrameType) -> str:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__"))
        if code.co_name in _BACKWARD and module.startswith(_AUTOGRAD):
            return "in a backward pass"
        if not code.co_varnames:
            return ""
        variables = locals_of(frame)
        library = _works_for_a_caller(module, code.co_filename)
        # A function of the user's own that was given the model may do anything, or nothing at all.
        first = variables.get(code.co_varnames[0]) if library or code.co_varnames[0] == "self" else None
        if not code.co_argcount:
            # A wrapper of a library around a method: *args
            first = (
                first[0] if type(first) is tuple and first and code.co_flags & inspect.CO_VARARGS else None
            )
        if id(first) in self._owners:
            return f"inside a {type(first).__name__}"
        if is_module(first) and self._has_weight(_weights(first)):
            return f"inside a {type(first).__name__} with the same weights"
        if library and self._has_weight(variables.values()):
            return "in a call with one of the weights"
        return ""

    def _has_weight(self, values: Iterable[Any]) -> bool:
        for value in values:
            inner = value if type(value) in (list, tuple) else (value,)
            for item in inner[:10_000]:
                if issubclass(type(item), torch.Tensor):
                    storage = storage_of(item)
                    if storage is not None and storage._cdata in self._storages:
                        return True
        return False


class Gates:
    """While other threads are waited for, calls that begin wait in front of the modules instead of going in.

    Calls that had begun before may go on. When the gates are opened, a call that waited goes on, or raises
    `ReleasedError` if its module was released meanwhile.
    """

    def __init__(self, roots: Iterable[Any], inside: Inside) -> None:
        self._inside = inside
        self._begun = {ident: entry for ident, (entry, _) in inside.threads().items()}
        self._waiting: set[int] = set()
        self._opened = threading.Event()
        self._gates: list[tuple[dict[str, Any], _Gate, Callable[..., Any] | None]] = []
        for root in roots:
            held = vars(root)
            # A compiled module would be compiled anew for a gate, and may not be: it is only waited for.
            if type(root).__name__ == "OptimizedModule" or held.get("_compiled_call_impl") is not None:
                continue
            gate = _Gate(self, root, root.forward)
            self._gates.append((held, gate, held.get("forward")))
            held["forward"] = gate

    def wait_until_empty(self, inside: Inside, until: float) -> bool:
        """Wait until no other thread is inside; whether one was.

        Raises:
            InUseError: there still is one at ``until`` (``time.monotonic()``).
        """
        waited = False
        while found := inside.threads(self._waiting):
            waited = True
            if time.monotonic() >= until:
                where = "; ".join(text for _, text in found.values())
                raise InUseError(
                    f"nothing was released: {where}. Let it finish first, or give release() more time with wait=SECONDS"
                )
            del found
            time.sleep(_TICK)
        self._begun.clear()
        return waited

    def pass_or_wait(self) -> None:
        """Called by a thread that is about to go in."""
        ident = threading.get_ident()
        entry = self._inside.of(running()[ident], ident) if ident in self._begun else None
        if entry is None or entry[0] is not self._begun.get(ident):
            del entry
            self._waiting.add(ident)
            try:
                self._opened.wait()
            finally:
                self._waiting.discard(ident)

    def open(self) -> None:
        """Take the gates away, and let those who wait go on."""
        for held, gate, forward in self._gates:
            if held.get("forward") is gate:
                if forward is not None:
                    held["forward"] = forward
                else:
                    del held["forward"]
        self._begun.clear()
        self._opened.set()


class _Gate:
    def __init__(self, gates: Gates, module: Any, forward: Callable[..., Any]) -> None:
        self.gates = gates
        self.module = module
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.gates.pass_or_wait()
        if message := released_message(self.module):
            raise ReleasedError(message)
        return self.forward(*args, **kwargs)


def _weights(module: Any) -> Iterator[Any]:
    for name, value in list(vars(module).items()):
        if name in ("_parameters", "_buffers"):
            yield from list(value.values())
        elif issubclass(type(value), torch.Tensor):
            yield value


def _works_for_a_caller(module: str, file: str) -> bool:
    return (
        module.partition(".")[0] in _LIBRARIES
        or "torchinductor" in file
        or file.startswith("<eval_with_key>")
    )


def _name(ident: int) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), str(ident))
