"""Lets one thread at a time make a model in a default dtype of its own: torch has one for the whole process."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref

from ..engine.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["DefaultDtype", "Loads", "restoring_turn", "turn"]

_turn = Lock()
_PATIENCE = 30.0  # seconds; then a thread does not wait any longer for one that may be waiting for it


def _given_up(lock: Any) -> Any:
    """The lock to wait for next, after ``lock`` was waited for too long.

    Its holder may be waiting for this thread, or may have ended without returning it: nobody waits for it any longer.
    """
    global _turn
    if _turn.held is lock:
        _turn = Lock()
    return _turn.held


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """While it is entered, other threads wait here; a thread that has the turn already goes on."""
    lock = _turn.held
    try:
        while not lock.acquire(timeout=_PATIENCE):
            lock = _given_up(lock)
        yield
    finally:
        # No call before it, after which a signal handler could raise.
        try:  # noqa: SIM105
            lock.release()
        except RuntimeError:  # not taken
            pass


class _Change:
    """The default dtype is to be what it was before, ``before``, when this object has gone.

    A thread that did not wait any longer may find the dtype of the load for which it did not wait; what that one found
    is what is restored after both.
    """

    __slots__ = ("__weakref__", "before", "thread")

    def __init__(self) -> None:
        import torch

        self.thread = threading.get_ident()
        others = [change for change in (held() for held in list(_changes)) if change is not None]
        alone = not others or any(change.thread == self.thread for change in others)
        self.before: Any = torch.get_default_dtype() if alone else others[0].before
        _changes.append(weakref.ref(self, _gone))


_changes: list[weakref.ref[_Change]] = []  # that are not undone, the oldest first


def _gone(change: weakref.ref[_Change]) -> None:
    with contextlib.suppress(ValueError):
        _changes.remove(change)


@contextlib.contextmanager
def restoring_turn() -> Iterator[None]:
    """`turn` for upstream's code that changes the default dtype and restores it: it is restored afterwards."""
    with turn():
        change = _Change()
        try:
            yield
        finally:
            _restore(change.before)


def _restore(before: Any) -> None:
    """Undo the change of upstream's code, in the turn in which it was made."""
    import torch

    if torch.get_default_dtype() != before:
        torch.set_default_dtype(before)


class DefaultDtype:
    """The default dtype that one call of ``from_pretrained`` changes while it makes its model, and its turn."""

    def __init__(self) -> None:
        self.lock: Any = None
        self.changed: _Change | None = None
        self._is_within = False

    def take_turn(self) -> None:
        """Wait for it, if the call does not have it."""
        if self.lock is None:
            self.lock = _turn.held
            while not self.lock.acquire(timeout=_PATIENCE):
                self.lock = _given_up(self.lock)

    def is_unchanged(self) -> bool:
        """Whether upstream's code may be about to change it: before the model is made, and once."""
        return self.changed is None and not self._is_within

    def change(self, change: Callable[[], object]) -> _Change:
        """``change()`` sets the default dtype, in this thread's turn."""
        self.take_turn()
        self.changed = changed = _Change()
        change()
        return changed

    def remember(self) -> None:
        """What the default dtype is now is what `restore` sets, if upstream's code has not changed it before."""
        if self.changed is None:
            self.changed = _Change()

    def enters(self) -> bool:
        """Whether the context manager that is entered is the one around the model: the first."""
        first, self._is_within = not self._is_within, True
        return first

    def restore(self) -> None:
        """Restore it and return the turn. Nothing happens the second time."""
        if self.changed is not None:
            _restore(self.changed.before)
        self.is_restored()

    def is_restored(self) -> None:
        """Return the turn."""
        self.changed = None
        if self.lock is not None:
            with contextlib.suppress(RuntimeError):  # not taken
                self.lock.release()
            self.lock = None


class Loads:
    """The calls of one library's ``from_pretrained``, in each thread.

    Args:
        module: the name of the library's module with ``from_pretrained``.
        restoring: whether upstream's code may restore the default dtype itself, still in its turn.
    """

    def __init__(self, module: str, restoring: bool) -> None:
        self._module, self._restoring = module, restoring
        self._thread = threading.local()

    def innermost(self) -> DefaultDtype | None:
        """Of this thread's call that began last; None if there is none, or if it began within `at_once`."""
        calls = self._calls()
        return calls[-1] if calls else None

    def loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``from_pretrained``, after which the default dtype is what it was, also after an error."""

        def from_pretrained(*args: Any, **kwargs: Any) -> Any:
            calls, dtype = self._calls(), DefaultDtype()
            count = len(calls)
            try:
                calls.append(dtype)
                return original(*args, **kwargs)
            finally:
                try:
                    del calls[count:]
                    dtype.restore()
                finally:
                    dtype.changed = None
                    lock = dtype.lock
                    if lock is not None:  # a signal handler has raised
                        try:  # noqa: SIM105
                            lock.release()
                        except RuntimeError:  # not taken
                            pass

        return from_pretrained

    def at_once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method that makes a model and loads nothing: the turn is taken for all of it."""

        def make(*args: Any, **kwargs: Any) -> Any:
            calls = self._calls()
            count = len(calls)
            with restoring_turn():
                try:
                    calls.append(None)
                    return original(*args, **kwargs)
                finally:
                    del calls[count:]

        return make

    def setting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``_set_default_torch_dtype``, which takes the turn.

        If upstream's code may not restore the dtype, it is given None. For all other code, which may be a subclass or a
        copy of upstream's ``from_pretrained``, it is upstream's.
        """

        def set_default_dtype(*args: Any, **kwargs: Any) -> Any:
            dtype = self.innermost()
            caller = sys._getframe(1).f_globals.get("__name__")
            if dtype is None or not dtype.is_unchanged() or caller != self._module:
                return original(*args, **kwargs)
            change = dtype.change(lambda: original(*args, **kwargs))
            return change.before if self._restoring else None

        return set_default_dtype

    def _calls(self) -> list[DefaultDtype | None]:
        found: list[DefaultDtype | None] = vars(self._thread).setdefault("calls", [])
        return found
