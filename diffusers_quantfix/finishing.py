"""Work that has to be done to its end, although the program is interrupted: Ctrl-C, a time limit, a lack of memory."""

from __future__ import annotations

import contextlib
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

__all__ = ["finished", "finished_after", "holding"]


@contextlib.contextmanager
def finished(steps: Callable[[], Iterable[Callable[[], Any]]]) -> Iterator[None]:
    """At the end of the block, run all of ``steps()``; a step that is interrupted, or fails, is run once more.

    Args:
        steps: gives them; each does what an earlier run of it has left.

    Raises:
        BaseException: of the block, or the first of a step, after the last one.
    """
    done = False
    try:
        try:
            yield
        finally:
            _run(steps())
            done = True
    finally:
        if not done:  # interrupted before the first step, or between two
            _run(steps())


def finished_after(work: Callable[[], Any], steps: Callable[[], Iterable[Callable[[], Any]]]) -> Any:
    """As `finished`, and return ``work()``, which takes the place of the block.

    This also holds if a second interruption comes while the first leaves ``work``: a ``with`` statement calls
    ``contextlib`` there, which does not come to the steps then.
    """
    done = False
    try:
        try:
            return work()
        finally:
            _run(steps())
            done = True
    finally:
        if not done:
            _run(steps())


@contextlib.contextmanager
def holding(module: Any, **some: Any) -> Iterator[None]:
    """In the block, the ``__dict__`` of ``module`` has ``some`` in the place of its own entries of these names."""
    held = vars(module)
    before = {name: held[name] for name in some}
    with finished(lambda: [partial(held.update, before)]):
        held.update(some)
        yield


def _run(steps: Iterable[Callable[[], Any]]) -> None:
    first: BaseException | None = None
    for step in steps:
        for _ in range(2):
            try:
                step()
                break
            except BaseException as error:
                first = first or error
    if first is not None:
        raise first
