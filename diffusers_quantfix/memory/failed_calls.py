"""Frees what the frames of failed calls hold: after an out-of-memory error the traceback keeps every activation."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterable, Iterator

__all__ = ["clear_failed_calls"]


# Frames of these libraries stand between a pipeline's caller and its method, and hold the arguments.
_WRAPPERS = frozenset({"torch", "accelerate", "diffusers", "transformers", "peft"})
_MODULE_CALL = "torch.nn.modules.module"


def clear_failed_calls(tracebacks: Iterable[types.TracebackType], released: set[int]) -> None:
    """Clear the locals of finished calls that ran inside released objects.

    Args:
        tracebacks: the live tracebacks, of caught exceptions that someone still holds.
        released: ``id`` of the released pipelines and modules. In a traceback, the first call of one of them and all
            that it called are cleared; the caller's own functions keep their locals, and the text of the traceback
            does not change.
    """
    for traceback in tracebacks:
        inside = False
        for frame in _frames(traceback):
            inside = inside or _is_call_of(frame, released)
            if inside:
                cells = _own_cells(frame)
                try:
                    frame.clear()
                except RuntimeError:  # still running, or a suspended generator
                    continue
                for cell in cells:
                    with contextlib.suppress(ValueError):  # it is empty
                        del cell.cell_contents


def _frames(traceback: types.TracebackType | None) -> Iterator[types.FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_call_of(frame: types.FrameType, released: set[int]) -> bool:
    """Whether ``frame`` is a method of a released object, or a library's wrapper around one."""
    code = frame.f_code
    # Not through f_locals: before Python 3.13 that leaves a copy of all locals behind.
    if code.co_argcount and code.co_varnames[0] == "self":
        return any(id(value) in released for value in gc.get_referents(frame))
    if str(frame.f_globals.get("__name__")).partition(".")[0] not in _WRAPPERS:
        return False
    arguments = [value for value in gc.get_referents(frame) if type(value) is tuple]
    return any(id(argument) in released for value in arguments for argument in value[:1])


def _own_cells(frame: types.FrameType) -> list[types.CellType]:
    """The variables of ``Module._call_impl`` that its inner function shares: clearing the frame does not reach them.

    Nowhere else: the cells of other functions may belong to closures that are still in use.
    """
    if frame.f_globals.get("__name__") != _MODULE_CALL:
        return []
    held = gc.get_referents(frame)
    functions = [
        value for value in held if isinstance(value, types.FunctionType) and value.__code__ is frame.f_code
    ]
    if (
        not functions
    ):  # Python 3.10: a frame does not know its function, so its cells cannot be told from others
        return []
    foreign = {id(cell) for cell in functions[0].__closure__ or ()}
    return [value for value in held if isinstance(value, types.CellType) and id(value) not in foreign]
