"""A lock that a forked child finds free: the thread that held it does not exist there."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["Lock"]


class Lock:
    """A reentrant lock, used by ``with lock.held``."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        _all.add(self)

    @property
    def held(self) -> Any:
        """The lock itself: between its own methods and the block there is no Python code, where a signal could leave it
        taken."""
        return self._lock

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[bool]:
        """The block, once the lock is free; without it, and with False, if it is not for so long."""
        taken = self._lock.acquire(timeout=seconds)
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()

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
