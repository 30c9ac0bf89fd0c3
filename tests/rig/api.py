"""The rig's Python interface: switch the devices on, ask what lies on them and what was copied."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from . import build, toolchain, without_cuda
from .accelerator import KEY, KIND

_HOST = -1
LATE = "DIFFUSERS_QUANTFIX_RIG_LATE"
# How the error of `assert_waited` begins.
NOT_WAITED = "who did not wait for the devices"


@dataclass(frozen=True)
class Traffic:
    """Bytes copied since the last ``reset()``: host to device, device to host, device to another device."""

    h2d: int
    d2h: int
    d2d: int


@functools.cache
def unavailable_reason() -> str | None:
    """Why there is no rig here, in one sentence; None if it is loaded. The first call compiles and loads it."""
    try:
        without_cuda.keep_out()
        path = build.library()
        import torch

        without_cuda.arm()
        torch.ops.load_library(str(path))
    except toolchain.Unavailable as reason:
        return str(reason)
    except Exception as error:  # a test suite must not break on a machine that we have not thought of
        return f"the fake CUDA device could not be loaded: {type(error).__name__}: {error}"
    return None


def load() -> bool:
    """Compile (about 12 s, cached) and load the backend; nothing changes until ``devices()``. Never raises.

    Best called before the first backward pass of the process: autograd counts the devices only once.
    """
    return unavailable_reason() is None


@contextlib.contextmanager
def devices(late: bool | None = None) -> Iterator[None]:
    """Have two CUDA devices inside the block and none after it.

    Args:
        late: whether they take time, see `tests.rig.late`; `hazards` tells who did not wait for them. None: as
            `is_late_asked_for` says.
    """
    late = is_late_asked_for() if late is None else late
    if reason := unavailable_reason():
        raise RuntimeError(f"the rig is not available: {reason}")
    from . import attention, bindings, bitsandbytes_native, bitsandbytes_ops, caches, collectives, operators
    from . import late as time
    from .undo import Undo

    _import_what_looks_for_gpus()
    with contextlib.ExitStack() as stack:
        _freeze_libraries()
        stack.callback(_collect_if_unfrozen)
        undo = stack.enter_context(Undo())
        undo.set(sys.modules[__name__], "_on", True)
        bindings.install(undo)
        bitsandbytes_native.install(undo)
        bitsandbytes_ops.install(undo)
        caches.install(undo)
        operators.install(undo)
        collectives.install(undo)
        attention.install(undo)
        reset()
        if late:
            undo.set(sys.modules[__name__], "_late", True)
            time.watch(undo)
        yield


def _import_what_looks_for_gpus() -> None:
    """bitsandbytes and quanto look for GPUs, once, when they are imported: bitsandbytes for CUDA's libraries, quanto,
    where torch is a CUDA build, to register kernels that it would compile. They must see the honest machine; what they
    need on the fake devices they are given here and in the tests.
    """
    with _not_collecting():
        if importlib.util.find_spec("bitsandbytes") is not None:
            import bitsandbytes  # noqa: F401
        if without_cuda.keep_out() is not None:
            with contextlib.suppress(ModuleNotFoundError):
                import optimum.quanto  # noqa: F401


@contextlib.contextmanager
def _not_collecting() -> Iterator[None]:
    """What is imported inside the block stays: collecting garbage among it takes a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_on = _late = False
_modules_aside = 0
_a_program_froze = False
_freeze, _unfreeze = gc.freeze, gc.unfreeze


def unfreeze_libraries() -> None:
    """Until the next ``devices()`` the garbage collector sees the libraries' objects too, as in a program."""
    global _modules_aside
    _unfreeze()
    _modules_aside = 0


def _freeze_for_a_program() -> None:
    """Take the place of `gc.freeze`, from the first ``devices()`` on."""
    global _a_program_froze
    _a_program_froze = True
    _freeze()


def _unfreeze_for_a_program() -> None:
    """Take the place of `gc.unfreeze`, which the package calls where it looks for holders of memory among all objects.

    Where nothing but we froze objects it would bring back the libraries' alone, and each look at all objects would take
    ten times as long: two thirds of the time of the tests of `release`. It stays after ``devices()``: a test without
    devices would bring them back for all tests after it.
    """
    global _a_program_froze
    if _a_program_froze:
        _a_program_froze = False
        unfreeze_libraries()


def _freeze_libraries() -> None:
    """The libraries' half a million objects need not be looked at whenever we collect: that took most of a test.

    `gc.get_freeze_count` is no way to ask whether they are: it counts them one by one.
    """
    global _modules_aside
    if len(sys.modules) != _modules_aside:
        gc.freeze, gc.unfreeze = _freeze_for_a_program, _unfreeze_for_a_program
        gc.collect()
        _freeze()
        _modules_aside = len(sys.modules)


def _collect_if_unfrozen() -> None:
    """Where the libraries were brought back, the next ``devices()`` collects, before it sets them aside again."""
    if _modules_aside:
        gc.collect()


def are_on() -> bool:
    """Whether the CUDA devices that torch sees now are the rig's."""
    return _on


def is_late_asked_for() -> bool:
    """Whether the variable `LATE` is "1": all devices of the process take time."""
    return os.environ.get(LATE) == "1"


def hazards() -> list:
    """The `late.Hazard` objects since the devices were last switched on late, empty where nobody had to wait."""
    from . import late

    return late.hazards()


def assert_waited() -> None:
    """Raise AssertionError with the `hazards`, if there are any and the devices are on and take time."""
    if _late and (found := hazards()):
        text = "\n".join(map(str, found))
        where = next(
            (end.frames[0] for end in (found[0].second, found[0].first) if end.frames), "no place in Python"
        )
        raise AssertionError(f"{NOT_WAITED}, {len(found)} times, first at {where}:\n{text}")


def device_count() -> int:
    """How many devices there are while they are switched on."""
    return 2


def allocated(device) -> int:
    """Bytes that live tensors hold on a device now (unreachable reference cycles are collected first)."""
    index = _index(device)
    if _ops().allocated(index):  # what is none needs no collection
        gc.collect()
    return _ops().allocated(index)


def peak(device) -> int:
    """The most bytes held on a device at any time since the last ``reset()``."""
    return _ops().peak(_index(device))


def traffic(device=None) -> Traffic:
    """Bytes copied between devices since the last ``reset()``; with a device, those into and out of it only.

    A copy within one device is no traffic, nor is what a kernel reads or writes.
    """
    everywhere = range(device_count())
    mine = set(everywhere) if device is None else {_index(device)}
    copied = _ops().traffic
    return Traffic(
        h2d=sum(copied(_HOST, i) for i in mine),
        d2h=sum(copied(i, _HOST) for i in mine),
        d2d=sum(copied(i, j) for i in everywhere for j in everywhere if i != j and mine & {i, j}),
    )


def overlapping(device=None) -> int:
    """Bytes copied from the host to a device, or to any, while it could compute, since the last ``reset()``.

    Those are copies from pinned memory, non-blocking, on another stream than the default one.
    """
    mine = range(device_count()) if device is None else [_index(device)]
    return sum(_ops().overlapping(i) for i in mine)


def reset() -> None:
    """Start over: no traffic so far, the peak is what is allocated now, cuda:0 is the current device."""
    gc.collect()
    _ops().reset_traffic()
    for i in range(device_count()):
        _ops().reset_peak(i)
    _ops().set_current_device(0)


def _ops():
    import torch

    return torch.ops.diffusers_quantfix_rig


def _index(device) -> int:
    import torch

    device = torch.device(KIND, device) if isinstance(device, int) else torch.device(device)
    if device.type != KIND:
        raise ValueError(f"the rig counts on {KEY} devices only, not on {device}")
    return _ops().current_device() if device.index is None else device.index
