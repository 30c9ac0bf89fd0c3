"""A time limit of the program's that is over at a chosen moment: ``SIGALRM``, whose handler raises."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class TimeIsUp(Exception):
    """What the handler raises."""


@contextlib.contextmanager
def time_limit() -> Iterator[Any]:
    """In the block the program has one; the yielded function ends its time, whatever it is called with."""

    def handler(number: int, frame: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield lambda *args, **kwargs: signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
