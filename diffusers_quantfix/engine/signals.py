"""Errors that a signal handler of the program raises while our code runs are the program's."""

from __future__ import annotations

import sys


def heed_signal(error: BaseException) -> None:
    """Raise ``error`` again if it came from a signal handler: the program expects it out of its own import."""
    if from_signal(error):
        raise error


def from_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program raised it in the middle of our code: a timeout, or an exit at SIGTERM."""
    signal = sys.modules.get("signal")  # a program that has set a handler has imported it
    if signal is None:
        return False
    handlers = filter(callable, map(signal.getsignal, signal.valid_signals()))
    codes = [code for code in map(_code_of, handlers) if code is not None]
    traceback = error.__traceback__
    while traceback is not None:
        if any(traceback.tb_frame.f_code is code for code in codes):
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: object) -> object:
    """The code of a function, a method, or an instance with ``__call__``."""
    try:
        called = handler if hasattr(handler, "__code__") else type(handler).__call__
        return getattr(getattr(handler, "__func__", called), "__code__", None)
    except Exception:  # attributes of other code's classes may raise
        return None
