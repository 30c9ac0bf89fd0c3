"""The hooks of `track` on the modules of a component, which say when its calls begin and end."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from string import Formatter
from typing import Any

from ..engine.classes import items_of
from ..engine.locks import Lock
from ..placement.components import is_script

__all__ = ["Calls"]

# Calls that take fewer seconds are short: they are only counted.
_SHORT = 0.001


class Calls:
    """Samples the beginning and end of a component's calls, except calls inside another call of it.

    Args:
        track: takes the samples.
        name: the component's name.
        watched: where the hooks on the component and its parts are listed.

    Attributes:
        turn: held while hooks change and calls are counted: other threads may be calling the component.
        inside: the calls that have begun and not ended: the thread of each, the id of its frame, and what code it
            runs.
    """

    def __init__(self, track: Any, name: str, watched: list[Any]) -> None:
        self.track = track
        self.begins, self.ends = f"{name} begins", f"{name} ends"
        self.inside: list[tuple[int, int, Any]] = []
        self.turn = Lock()
        self._watched = watched

    def watch(self, module: Any, parts: Sequence[Any] = ()) -> None:
        """Watch the calls of ``module``, unless it is compiled in place or TorchScript, which accepts no hooks.

        Args:
            module: the component or one of its parts.
            parts: for the component: the watched parts. Once the component itself is called, its parts are called
                inside, and are no longer watched.
        """
        if getattr(module, "_compiled_call_impl", None) is not None or is_script(module):
            return
        # Listed before it has hooks: Ctrl-C may come in between.
        for one in (_Watched(self, module), *([_First(self, module, parts)] if parts else ())):
            self._watched.append(one)
            one.begin(module)


class _Hook:
    """A hook of this package. In a copy or pickle of its module, a standard library function that does nothing replaces
    it, so that the file can be loaded without this package."""

    __slots__ = ("_call",)

    def __init__(self, call: Any) -> None:
        self._call = call

    @property
    def owner(self) -> Any:
        """The object whose method it calls."""
        return self._call.__self__

    @property
    def __name__(self) -> str:  # which only torch.jit.script asks for
        raise AttributeError(
            "torch.jit.script() cannot compile a model inside of track(): do it before the block"
        )

    def __call__(self, *arguments: Any) -> None:
        import torch  # not needed where nothing with hooks is tracked

        # torch.compile, which does not ask for the hooks again, would keep one of them, or break its graph.
        if not torch.compiler.is_compiling():
            self._call(*arguments)

    def __reduce__(self) -> Any:
        of_three = getattr, (Formatter(), "check_unused_args")
        return of_three if self._call.__name__ == "_end" else (partial, (Formatter().check_unused_args, None))


def _take_off(module: Any, owner: Any) -> None:
    """Remove the hooks that call ``owner``, also one whose registration was interrupted."""
    if module is None:
        return
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in items_of(hooks):
            if type(hook) is _Hook and hook.owner is owner:
                hooks.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


class _First:
    """The hook that ends the watch of a component's parts once the component itself is called."""

    def __init__(self, calls: Calls, module: Any, parts: Sequence[Any]) -> None:
        self._calls, self._parts = calls, parts
        self._module = weakref.ref(module)

    def begin(self, module: Any) -> None:
        module.register_forward_pre_hook(_Hook(self._first), prepend=True)

    def remove(self) -> None:
        """Remove the hook."""
        with self._calls.turn.held:
            _take_off(self._module(), self)

    def _first(self, module: Any, args: Any) -> None:
        if not self._calls.inside:
            for each in (self, *self._parts):
                each.remove()


class _Watched:
    """The hooks of one module.

    A module with short calls has one hook only, which counts them until a sample is due: two hooks per call take as
    long as a small layer. A call in another thread may have begun with hooks that were removed meanwhile.
    """

    def __init__(self, calls: Calls, module: Any) -> None:
        self._calls = calls
        self._began = 0.0
        self._short = False
        self._counts = False
        self._counted = 0
        self._over = False
        self._module = weakref.ref(module)

    def begin(self, module: Any) -> None:
        with self._calls.turn.held:
            self._watch(module)

    def remove(self) -> None:
        """Remove the hooks for good."""
        with self._calls.turn.held:
            self._over = True
            self._drop()

    def _drop(self) -> None:
        _take_off(self._module(), self)
        self._calls.track.left_out += 2 * self._counted
        self._counted = 0

    def _watch(self, module: Any) -> None:
        module.register_forward_hook(_Hook(self._end), always_call=True)
        module.register_forward_pre_hook(_Hook(self._begin))
        self._counts = False

    def _begin(self, module: Any, args: Any) -> None:
        calls = self._calls
        with calls.turn.held:
            if self._over or self._counts:
                return
            while calls.inside and _is_over(*calls.inside[0]):
                del calls.inside[0]
            # Not in `_end`: torch is iterating over those hooks then.
            if self._short and not calls.inside and time.perf_counter() < calls.track._due_in_short_calls:
                self._drop()
                self._counted = 1
                module.register_forward_pre_hook(_Hook(self._count))
                self._counts = True
                return
            frame = _caller()
            calls.inside.append((threading.get_ident(), id(frame), frame.f_code))
            is_outermost = len(calls.inside) == 1
        if is_outermost:
            calls.track.take_at_call(calls.begins)
            self._began = time.perf_counter()

    def _end(self, module: Any, args: Any, output: Any) -> None:
        calls = self._calls
        with calls.turn.held:
            # A call that failed before `_begin` (another hook raised) ends too.
            thread = threading.get_ident()
            of_this = [at for at, call in enumerate(calls.inside) if call[0] == thread]
            if of_this:
                del calls.inside[of_this[-1]]
            if calls.inside or self._over:
                return
        self._short = time.perf_counter() - self._began < _SHORT
        calls.track.take_at_call(calls.ends)

    def _count(self, module: Any, args: Any) -> None:
        if time.perf_counter() < self._calls.track._due_in_short_calls:
            self._counted += 1
            return
        with self._calls.turn.held:
            if self._over or not self._counts:
                return
            self._drop()
            self._watch(module)
        self._begin(module, args)


def _caller() -> Any:
    """The frame of torch that calls a hook of this module."""
    frame: Any = sys._getframe()
    while frame.f_globals is globals():
        frame = frame.f_back
    return frame


def _is_over(thread: int, number: int, code: Any) -> bool:
    """Whether the call whose frame had this id was left without an end: torch calls no hook after a KeyboardInterrupt
    or another error that is no Exception. In its own thread it is above the call that asks."""
    frame = _caller().f_back if thread == threading.get_ident() else sys._current_frames().get(thread)
    while frame is not None and not (id(frame) == number and frame.f_code is code):
        frame = frame.f_back
    return frame is None
