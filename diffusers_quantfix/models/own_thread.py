"""What libraries replace for a moment in classes and modules of torch, replaced for one thread only.

``accelerate.init_empty_weights`` sets ``torch.nn.Module.register_parameter`` while a model is made. Of two threads that
do so, the second takes the first one's function for the original, and puts it back for good.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from types import FunctionType

from ..engine.errors import TargetMissing
from ..engine.locks import Lock
from ..engine.probe import name_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import Any

__all__ = ["in_own_thread", "replaced"]

_lock = Lock()
_thread = threading.local()
_OF_THIS_THREAD = "of_this_thread"  # an attribute of the function that is there for all threads


class _Within:
    """A context manager is entered as long as this object is alive, which only its frame holds.

    Ctrl-C may end whatever is done when it is left; but not that the frame lets go.
    """

    __slots__ = ("__weakref__",)


class _Replacement:
    """A function that one thread has put in the place of another."""

    def __init__(self, function: Any, within: weakref.ref[_Within]) -> None:
        self.function = function
        # Not its number, which a later thread may get, in a forked child too.
        self.thread = _this_thread()
        self.within = within
        self.calls = 0  # under way


class _Shared:
    """An attribute of a class or a module while threads have replacements for it.

    It holds a function that calls the replacement of the thread that calls it, or else what was there before. A library
    that is not patched may put that function back later, so it goes on calling what was there before.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.before = vars(owner)[name]
        self.usual = getattr(owner, name)
        self.replacements: tuple[_Replacement, ...] = ()

        @functools.wraps(self.usual)
        def function(*args: Any, **kwargs: Any) -> Any:
            replacement = self._replacement()
            if replacement is None:
                return self.usual(*args, **kwargs)
            # It may call this function for the one before: transformers keeps what it finds in ``torch.nn.init``.
            replacement.calls += 1
            try:
                return replacement.function(*args, **kwargs)
            finally:
                replacement.calls -= 1

        setattr(function, _OF_THIS_THREAD, self.current)
        self.function = function

    def current(self) -> Any:
        """What this thread calls."""
        replacement = self._replacement()
        return self.usual if replacement is None else replacement.function

    def _replacement(self) -> _Replacement | None:
        thread = _this_thread()
        for replacement in reversed(self.replacements):
            if replacement.thread is thread and not replacement.calls and replacement.within() is not None:
                return replacement
        return None

    def add(self, replacement: _Replacement) -> None:
        self.replacements = (*self.replacements, replacement)
        if vars(self.owner).get(self.name) is not self.function:
            setattr(self.owner, self.name, self.function)

    def remove(self, replacement: _Replacement, is_put_back: bool) -> None:
        """Also in another thread than the one that added it.

        Args:
            replacement: the one that ends.
            is_put_back: whether the library puts back what was there before, whatever is there now.
        """
        left = [
            other for other in self.replacements if other is not replacement and other.within() is not None
        ]
        self.replacements = tuple(left)
        held = vars(self.owner).get(self.name)
        back = self.function if self.replacements else self.before
        if back is not held and (
            held is self.function or (is_put_back and _of(self.owner, self.name) is None)
        ):
            setattr(self.owner, self.name, back)


class _Replaced:
    """The replacements of one context manager."""

    def __init__(self) -> None:
        self._within: Any = None
        self._made: dict[tuple[int, str], tuple[_Shared, _Replacement]] = {}

    def begin(self, within: _Within) -> None:
        """Before anything is replaced."""
        self._within = weakref.ref(within)

    def set(self, owner: Any, name: str, function: Any) -> None:
        """The first time it is replaced, the second time it is put back."""
        if isinstance(owner, _View):
            owner = owner._owner
        with _lock.held:
            made = self._made.get((id(owner), name))
            if made is not None:
                shared, replacement = made
                shared.remove(replacement, True)
                return
            shared, replacement = (
                _of(owner, name) or _Shared(owner, name),
                _Replacement(function, self._within),
            )
            self._made[id(owner), name] = shared, replacement
            shared.add(replacement)

    def end(self) -> None:
        """Put back what is not yet."""
        with _lock.held:
            for shared, replacement in self._made.values():
                shared.remove(replacement, False)


class _View:
    """A class or a module, as the code of one context manager gets and sets its attributes."""

    __slots__ = ("_owner", "_replaced")

    def __init__(self, owner: Any, replaced: _Replaced) -> None:
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._owner, name)
        shared = _of(self._owner, name)
        if shared is not None:
            return shared.current()
        return _View(value, self._replaced) if _has_parts(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        self._replaced.set(self._owner, name, value)


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While it is entered, this thread finds ``function`` as ``owner.name``.

    Args:
        owner: a class or a module, which has the attribute itself.
        name: of the attribute.
        function: for a class a method, which gets the instance too.
    """
    within, own = _Within(), _Replaced()
    own.begin(within)
    try:
        own.set(owner, name, function)
        yield
    finally:
        del within
        own.end()


def in_own_thread(context: Any, **others: Any) -> Any:
    """A context manager of a library, whose changes are made for the thread only that enters it: of attributes of
    ``torch``, ``torch.nn.Module`` and ``torch.nn.init``, and what it calls ``setattr`` for.

    The library's own code runs, with views of ``torch`` and ``torch.nn`` and another ``setattr``.

    Args:
        context: the function, made by ``contextlib.contextmanager``, or the one that this was given.
        others: global variables of its own.

    Raises:
        TargetMissing: it is not such a function, or another tool has wrapped it.
    """
    function = context if inspect.isgeneratorfunction(context) else getattr(context, "__wrapped__", None)
    if not isinstance(function, FunctionType) or not inspect.isgeneratorfunction(function):
        raise TargetMissing(f"{name_of(context)} is not a context manager made of a generator")

    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        own = _Replaced()
        variables = {**function.__globals__, **others, "setattr": own.set}
        for name in ("torch", "nn"):
            if _has_parts(variables.get(name)):
                variables[name] = _View(variables[name], own)
        code = FunctionType(
            function.__code__, variables, function.__name__, function.__defaults__, function.__closure__
        )
        code.__kwdefaults__ = function.__kwdefaults__
        return _entered(code(*args, **kwargs), own)  # wrong arguments are refused here

    return contextlib.contextmanager(run)


def _entered(generator: Generator[Any, Any, Any], own: _Replaced) -> Generator[Any, Any, Any]:
    within = _Within()
    own.begin(within)
    try:
        return (yield from generator)
    finally:
        del within
        own.end()


def _of(owner: Any, name: str) -> _Shared | None:
    """What threads share in this attribute, if its function is there now."""
    held = vars(owner).get(name)
    shared: _Shared | None = getattr(getattr(held, _OF_THIS_THREAD, None), "__self__", None)
    # A function that wraps another one has copies of its attributes.
    return shared if isinstance(shared, _Shared) and shared.function is held else None


def _has_parts(value: Any) -> bool:
    """Whether libraries replace attributes of it."""
    import torch

    # Not `any`: its generator would swallow what a signal handler raises within.
    return value is torch or value is torch.nn or value is torch.nn.init or value is torch.nn.Module


def _this_thread() -> object:
    try:
        token: object = _thread.token
    except AttributeError:
        token = _thread.token = object()
    return token
