"""torch's own stream sanitizer on the rig, as a second opinion on the programs of `tests.rig.test_late`.

It is told what it does not know by itself: a copy that blocks, ``item()``, ``nonzero`` and a mask as an index make the
host wait for their stream. It compares what operators of Python's thread do to the first byte of tensors on devices; it
does not follow reads and writes of the host, memory that is freed or used again, and other threads.

torch calls it back through a switch that cannot be switched off, so it runs in a process of its own, in which the rig
was loaded before torch: ``from tests import rig; rig.load(); from tests.rig import second_opinion``.

Upstream: torch/cuda/_sanitizer.py (``CUDASanitizerDispatchMode``).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.cuda import _sanitizer

from tests import rig

# Operators that give the host a value, so that it waits.
_READ_BY_THE_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


class SecondOpinion(_sanitizer.CUDASanitizerDispatchMode):
    """Keeps the errors in ``errors`` instead of raising them."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []
        launch = self.event_handler._handle_kernel_launch

        def keep(*arguments: Any) -> list[Exception]:
            self.errors += launch(*arguments)
            return []

        self.event_handler._handle_kernel_launch = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.record_stream.default:  # taken for a kernel by older releases
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _blocks(func, args, kwargs or {}, result):
            self.event_handler._handle_stream_synchronization(torch.cuda.current_stream().cuda_stream)
        return result


def _blocks(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
    name = func._schema.name
    if name in _READ_BY_THE_HOST:
        return True
    if name == "aten::index":  # with a mask, of which the host counts what is True
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if name not in ("aten::copy_", "aten::_to_copy"):
        return False
    source = args[1] if name == "aten::copy_" else args[0]
    asked = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
    host = next((tensor for tensor in (source, result) if tensor.device.type == "cpu"), None)
    if host is None or source.device == result.device:
        return False
    # To pageable memory a copy always blocks; from there it is only read before it returns.
    return not asked or (host is result and not host.is_pinned())


def programs() -> Iterator[tuple[str, Callable[[Any], None]]]:
    """The tests of `tests.rig.test_late` that need nothing but late devices, or one more argument of a short list."""
    from tests.rig import test_late

    for name, function in vars(test_late).items():
        parameters = list(inspect.signature(function).parameters) if inspect.isfunction(function) else []
        if not name.startswith("test_") or parameters[:1] != ["late"]:
            continue
        marks = getattr(function, "pytestmark", [])
        if any(mark.name == "skipif" and mark.args[0] for mark in marks):
            continue
        if len(parameters) == 1:
            yield name, function
            continue
        (mark,) = (mark for mark in marks if mark.name == "parametrize")
        for value in mark.args[1]:
            label = value if isinstance(value, str) else getattr(value, "__name__", "function")
            yield f"{name}[{label}]", _with(function, value)


def _with(function: Callable, value: Any) -> Callable[[Any], None]:
    return lambda late: function(late, value)


def reports() -> dict[str, list[int]]:
    """For each program how many errors the sanitizer reports, and how many hazards the rig."""
    from tests.rig.test_late import Program

    found = {}
    for name, program in programs():
        with rig.devices(late=True):
            made = Program()
            opinion = SecondOpinion()
            # The places of hazards are looked for last, and are those of the mode here.
            with opinion, contextlib.suppress(AssertionError, IndexError):
                program(made)
            found[name] = [len(opinion.errors), len(rig.hazards())]
    return found
