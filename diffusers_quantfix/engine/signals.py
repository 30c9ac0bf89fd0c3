"""Errors that a signal handler of the program raises while our code runs are the program's."""

from __future__ import annotations

import sys
from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def heed_signal(error: BaseException) -> None:
    """Raise ``error`` again if it came from a signal handler: the program expects it out of its own import."""
    if from_signal(error):
        raise error


def from_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program raised it in the middle of our code: a timeout, or an exit at SIGTERM.

    A handler is known by what Python calls it with: the number of a signal and the frame that it interrupts. What is
    registered now may be another one: helpers with a time limit put the previous handler back before they raise.
    """
    signal = sys.modules.get("signal")  # a program that has set a handler has imported it
    if signal is None:
        return False
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    numbers = signal.valid_signals()
    return any(_handles(frame, before, numbers) for before, frame in pairwise(frames))


def _handles(frame: FrameType, interrupted: FrameType, numbers: set[int]) -> bool:
    """Whether a function was called with a signal's number and the frame that it interrupts."""
    try:
        code = frame.f_code
        names = code.co_varnames[
            : code.co_argcount + code.co_kwonlyargcount + 2
        ]  # and ``*args``, ``**kwargs``
        given = [frame.f_locals[name] for name in names if name in frame.f_locals]
        given += [value for one in given if isinstance(one, tuple) for value in one]
        return any(one is interrupted for one in given) and any(
            isinstance(one, int) and one in numbers for one in given
        )
    except Exception:  # values of the program's, which may raise on any use
        return False
