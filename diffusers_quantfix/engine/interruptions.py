"""Errors that the program raises in the middle of our code: they are the program's, and it waits for them."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, FunctionType
    from typing import Any

_DECORATORS = 8  # around a function, one in another
_REPLACED = 8  # errors, one raised while another one is handled
_NOBODY = object()
# What another thread puts in to end this one, and the functions that code calls to raise it itself.
_ENDS = {SystemExit: {"exit", "quit"}, TimeoutError: set[str]()}
# Errors of the standard library's debugger, by which the user leaves the program.
_OF_PDB = ("BdbQuit", "Restart")
# What a trace or profile function is told of.
_EVENTS = frozenset(("call", "line", "return", "exception", "opcode", "c_call", "c_return", "c_exception"))


def heed_interruption(error: BaseException) -> None:
    """Raise ``error`` again if the program interrupted us with it: it expects it out of its own import.

    Or the error in whose place it came: what a library cleans up after an interruption may fail.
    """
    found: BaseException | None = error
    for _ in range(_REPLACED):
        if found is None:
            return
        if is_interruption(found):
            raise found
        found = _replaced(found)


def _replaced(error: BaseException) -> BaseException | None:
    """The error during which another one was raised, in a frame below the one that has caught that."""
    context = error.__context__
    if context is None or context.__traceback__ is None:
        return None
    return context if context.__traceback__.tb_frame in _frames(error)[1:] else None


def _frames(error: BaseException) -> list[FrameType]:
    """The frames that an error went through, from the one that has caught it to the one that raised it."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def is_interruption(error: BaseException) -> bool:
    """Whether the program raised it in the middle of our code: a timeout, a cancelled job, or an exit at SIGTERM.

    A signal handler did, a trace function (that of a debugger, or of a thread that can be ended), or another thread,
    with ``PyThreadState_SetAsyncExc``.
    """
    frames = _frames(error)
    return _of_a_handler(frames) or _of_a_tracer(error, frames) or _of_another_thread(error, frames)


def _of_a_handler(frames: list[FrameType]) -> bool:
    """A handler is known by what Python calls it with: the number of a signal and the frame that it interrupts.

    What is registered now may be another one: helpers with a time limit put the previous one back before they raise.
    But a handler may also have deleted what it was called with.
    """
    if len(frames) < 2:
        return False
    handlers = _handlers()
    return any(
        any(_is_call_of(frame, *one) for one in handlers.get(id(frame.f_code), ())) or _handles(frame, before)
        for before, frame in pairwise(frames)
    )


def _handlers() -> dict[int, list[tuple[FunctionType, Any]]]:
    """The functions that are registered for signals, and their decorators, by the id of their code: each with the
    object that it is called for, if there is one."""
    from functools import partial
    from types import FunctionType, MethodType

    # A program that has set a handler has imported it. Another thread may be importing it now.
    signal = sys.modules.get("signal")
    valid_signals, getsignal = getattr(signal, "valid_signals", None), getattr(signal, "getsignal", None)
    if valid_signals is None or getsignal is None:
        return {}
    found: dict[int, list[tuple[FunctionType, Any]]] = {}
    for number in valid_signals():
        try:
            handler, of = getsignal(number), _NOBODY
            for _ in range(_DECORATORS):
                if isinstance(handler, partial):
                    handler, of = handler.func, _NOBODY
                elif isinstance(handler, MethodType):
                    of, handler = handler.__self__, handler.__func__
                elif isinstance(handler, FunctionType):
                    found.setdefault(id(handler.__code__), []).append((handler, of))
                    handler, of = vars(handler).get("__wrapped__"), _NOBODY
                else:
                    handler, of = getattr(type(handler), "__call__", None), handler  # noqa: B004  # the function
        except Exception as odd:  # objects of the program's, which may raise on any use
            _heed_tracer(odd)
    return found


def _is_call_of(frame: FrameType, function: FunctionType, of: Any) -> bool:
    """Whether a frame that has the code of ``function`` is a call of it, for the object ``of``.

    All functions that a decorator makes have one code, and all methods of a class: these differ in what they enclose
    and in their first argument.
    """
    code, held = frame.f_code, frame.f_locals
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            enclosed = cell.cell_contents
        except ValueError:  # empty
            continue
        if held.get(name, enclosed) is not enclosed:
            return False
    return of is _NOBODY or not code.co_argcount or held.get(code.co_varnames[0], of) is of


def _of_a_tracer(error: BaseException, frames: list[FrameType]) -> bool:
    """Whether a trace function wants to end the program or thread with it. It is known as a handler is, by a frame and
    an event: Python takes a trace function away that raises.

    Not what it fails at: one that looks at every argument meets objects of probes that others have not. An error of a
    class of Python's or of a library that is traced is meant if a statement of the tracer's own package raised it.
    """
    for at, frame in enumerate(frames):
        # What ``sys.monitoring`` calls when an error is raised or handled is no part of that frame's traceback.
        before = [one for one in (frames[at - 1] if at else None, frame.f_back) if one is not None]
        if not any(_traces(frame, one) for one in before):
            continue
        kind = type(error)
        if not issubclass(kind, Exception) or issubclass(kind, TimeoutError) or kind.__name__ in _OF_PDB:
            return True
        package, traced = _package(str(kind.__module__)), map(_package_of, (*frames[:at], *before))
        is_of_the_program = package not in sys.stdlib_module_names and package not in traced
        return _is_raised(error) and (is_of_the_program or _package_of(frame) == _package_of(frames[-1]))
    return False


def _heed_tracer(error: Exception) -> None:
    """Raise what a trace function raised while another error was looked at."""
    if _of_a_tracer(error, _frames(error)):
        raise error


def _traces(frame: FrameType, traced: FrameType) -> bool:
    """Whether a function was called with a tracer's event and the frame in which it happens, or as ``sys.monitoring``
    calls one, with the code that runs and a number."""
    try:
        given = _given(frame)
        # In Python 3.11 the frame that returns is no part of the traceback, but the one that called it is.
        of_the_frame = any(
            one is traced or (isinstance(one, type(frame)) and one.f_back is traced) for one in given
        )
        if of_the_frame and any(type(one) is str and one in _EVENTS for one in given):
            return True
        return any(one is traced.f_code for one in given) and any(type(one) is int for one in given)
    except Exception:  # values of the program's, which may raise on any use
        return False


def _handles(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether a function was called with a signal's number and the frame that it interrupts."""
    try:
        given = _given(frame)
        return any(one is interrupted for one in given) and _has_signal_number(given)
    except Exception as odd:  # values of the program's, which may raise on any use
        _heed_tracer(odd)
        return False


def _given(frame: FrameType) -> list[Any]:
    """What the function of a frame was called with, as far as it still has it."""
    code, held = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]  # and ``*args``, ``**kwargs``
    given = [held[name] for name in names if name in held]
    return given + [value for one in given if isinstance(one, tuple) for value in one]


def _has_signal_number(values: list[Any]) -> bool:
    valid_signals = getattr(sys.modules.get("signal"), "valid_signals", None)
    numbers = () if valid_signals is None else valid_signals()
    return any(isinstance(one, int) and one in numbers for one in values)


def _of_another_thread(error: BaseException, frames: list[FrameType]) -> bool:
    """Whether it appeared in code that cannot raise it: a class of a package that none of the frames belongs to.

    What another thread puts in is a class, of which Python makes an instance without arguments.
    """
    try:
        kind = type(error)
        if _is_raised(error):
            return False
        if kind in _ENDS:
            return not error.args and _ENDS[kind].isdisjoint(frames[-1].f_code.co_names)
        package = _package(kind.__module__)
        if (
            package in sys.stdlib_module_names
            or package == _package(__name__)
            or _is_compiled(kind.__module__)
        ):
            return False
        if error.args and not any(
            "__init__" in vars(one) for one in kind.__mro__ if _package(one.__module__) == package
        ):
            return False
        return all(_package(frame.f_globals.get("__name__", "")) != package for frame in frames)
    except Exception as odd:  # a class of the program's, which may raise on any use
        _heed_tracer(odd)
        return False


def _is_raised(error: BaseException) -> bool:
    """Whether a statement raised it. What another thread puts in comes where a function begins, loops or calls."""
    from opcode import opmap

    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] in (opmap["RAISE_VARARGS"], opmap["RERAISE"])


def _is_compiled(module: str) -> bool:
    """Whether the package of a module has compiled code, of which no frame shows that it raised an error."""
    package = _package(module)
    return module not in sys.modules or any(
        str(getattr(sys.modules.get(name), "__file__", "")).endswith(tuple(EXTENSION_SUFFIXES))
        for name in list(sys.modules)
        if _package(name) == package
    )


def _package_of(frame: FrameType) -> str:
    return _package(str(frame.f_globals.get("__name__", "")))


def _package(module: str) -> str:
    return module.partition(".")[0]
