"""A lock that a forked child finds free: the thread that held it does not exist there."""

from __future__ import annotations

import os
import threading
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    _Result = TypeVar("_Result")

__all__ = ["Lock"]


class Lock:
    """A reentrant lock, used by ``with lock.held`` or `run`."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        _all.add(self)

    @property
    def held(self) -> Any:
        """The lock itself: between its own methods and the block there is no Python code, where a signal could leave it
        taken."""
        return self._lock

    def run(self, work: Callable[[bool], _Result], within: float) -> _Result:
        """``work(True)``, once the lock is free; ``work(False)`` without it, if it is not for ``within`` seconds."""
        lock = self._lock
        if lock._is_owned():  # by an outer call
            return work(True)
        try:
            return work(lock.acquire(timeout=within))
        finally:
            # A signal handler may raise after any call: after `acquire` has returned, so that no variable says that the
            # lock is taken, and after a call that asks. So there is none before `release`.
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:  # not taken
                pass

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()  # the copy of what has one has its own

    def after_fork(self) -> None:
        """In the child; the thread that forked keeps it."""
        if not self._lock._is_owned():
            self._lock = threading.RLock()


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _all:
        lock.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
