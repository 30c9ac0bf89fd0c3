"""Supplies what a CUDA or XPU build of torch binds in ``torch._C``, so that torch's own Python code finds the fake
devices.

Only these bindings are supplied; ``torch.cuda`` and ``torch.accelerator`` above them are torch's own. The exceptions
are the classes whose C++ base a CPU build replaces by a dummy (streams, events, device properties), memory figures
that go through the CUDA runtime library, and storages, which a CPU build cannot create on a CUDA device.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
import types

import torch

from .accelerator import KIND, KINDS
from .undo import Undo

TOTAL_MEMORY = 16 << 30  # as in backend/memory.h
CAPABILITY = (8, 0)
_MODULE = getattr(torch, KIND)
_IS_BUILT = {
    "cuda": (torch.backends.cuda, "is_built", lambda: True),
    "xpu": (torch._C, "_has_xpu", True),
}


def install(undo: Undo) -> None:
    """Switch the devices on until ``undo`` is done."""
    ops = torch.ops.diffusers_quantfix_rig
    ops.enable(True)
    undo.call(ops.enable, False)
    for name, function in _bindings(ops).items():
        undo.set(torch._C, f"_{KIND}_{name}", function)
    for name, value in _torch_module(ops).items():
        undo.set(_MODULE, name, value)
    undo.set(_MODULE.memory, "mem_get_info", _MODULE.mem_get_info)
    _adopt(Stream, Event)
    undo.set(_MODULE.streams, "Stream", Stream)
    undo.set(_MODULE.streams, "Event", Event)
    undo.set(*_IS_BUILT[KIND])
    # torch.compile asks CUDA's runtime library, since torch 2.15
    undo.set(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    try:
        torch.Generator(KIND)
    except RuntimeError:  # before torch 2.6 torch.Generator("cuda") calls CUDA's code by name
        undo.set(torch, "Generator", _generator_class(ops))
    undo.set(torch.UntypedStorage, "__new__", staticmethod(_new_storage))
    undo.set(torch.UntypedStorage, "resize_", _resize_storage(ops, torch.UntypedStorage.resize_))


@functools.cache
def _library() -> ctypes.CDLL:
    # The one that is loaded: peft leaves another CXX in the environment when it cannot compile its kernel for BOFT.
    (loaded,) = (path for path in torch.ops.loaded_libraries if os.path.basename(path).startswith("rig-"))
    library = ctypes.CDLL(loaded)
    library.rig_current_stream.argtypes = [ctypes.c_int64]
    library.rig_current_stream.restype = ctypes.c_int64
    library.rig_set_stream.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.rig_set_stream.restype = None
    for name in ("rig_synchronize", "rig_empty_cache"):
        getattr(library, name).argtypes = []
        getattr(library, name).restype = None
    library.rig_host_touches.argtypes = [ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64]
    library.rig_host_touches.restype = None
    return library


def _bindings(ops) -> dict:
    def exchange_device(index: int) -> int:
        previous = ops.current_device()
        if index >= 0:
            ops.set_current_device(index)
        return previous

    # A function of its own: torch.compile registers a handler for each of the two.
    def maybe_exchange_device(index: int) -> int:
        return exchange_device(index)

    def set_device(index: int) -> None:
        exchange_device(index)

    def memory_stats(index: int) -> dict:
        of_bytes = {"all": {"current": ops.allocated(index), "peak": ops.peak(index)}}
        return {f"{kind}_bytes": of_bytes for kind in ("allocated", "reserved", "active", "requested")}

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        _library().rig_set_stream(device_index, stream_id)

    def current_stream(index: int) -> tuple:
        return _library().rig_current_stream(index), index, KINDS[KIND]

    def default_stream(index: int) -> tuple:
        return 0, index, KINDS[KIND]

    nothing = _do_nothing
    return {
        "getDeviceCount": lambda: 2,
        "getDevice": ops.current_device,
        "setDevice": set_device,
        "exchangeDevice": exchange_device,
        "maybeExchangeDevice": maybe_exchange_device,
        "canDeviceAccessPeer": lambda device, peer: True,
        "getArchFlags": lambda: "sm_{}{}".format(*CAPABILITY),
        "synchronize": lambda *device: _library().rig_synchronize(),  # XPU passes one
        "ipc_collect": nothing,
        "emptyCache": lambda: _library().rig_empty_cache(),
        "memoryStats": memory_stats,
        "resetPeakMemoryStats": ops.reset_peak,
        "resetAccumulatedMemoryStats": nothing,
        "getCurrentStream": current_stream,
        "getDefaultStream": default_stream,
        "setStream": set_stream,
        "getCurrentRawStream": lambda index: current_stream(index)[0],
    }


def _torch_module(ops) -> dict:
    def properties(index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name=f"fake {KIND.upper()} device {index}",
            major=CAPABILITY[0],
            minor=CAPABILITY[1],
            total_memory=TOTAL_MEMORY,
            multi_processor_count=8,
            warp_size=32,
            has_fp64=True,
        )

    def mem_get_info(device=None) -> tuple[int, int]:
        index = _MODULE._utils._get_device_index(device, optional=True)
        return TOTAL_MEMORY - ops.allocated(index), TOTAL_MEMORY

    return {
        "_initialized": True,
        # A CUDA build says it in a forked process once its devices were counted; these are memory of the host.
        "_is_in_bad_fork": lambda: False,
        "_cached_device_count": 2,
        "default_generators": tuple(ops.default_generator(i) for i in range(2)),
        "_exchange_device": getattr(torch._C, f"_{KIND}_exchangeDevice"),
        "_maybe_exchange_device": getattr(torch._C, f"_{KIND}_maybeExchangeDevice"),
        "_get_device_properties": properties,
        "mem_get_info": mem_get_info,
        "Stream": Stream,
        "Event": Event,
    }


def _do_nothing(*args) -> None:
    """Nothing is kept for other processes, and no statistics add up."""


def host_reads(address: int, size: int) -> None:
    """Tell `late` that the host reads memory in a way of its own."""
    _library().rig_host_touches(address, size, 0)


class Stream(torch.Stream):
    """``torch.cuda.Stream``, or that of XPU, over the stream type that torch has for every backend."""

    def __new__(cls, device=None, priority=0, **kwargs):
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        index = _MODULE._utils._get_device_index(device, optional=True)
        return super().__new__(cls, torch.device(KIND, index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    sycl_queue = cuda_stream


class Event(torch.Event):
    """``torch.cuda.Event``, or that of XPU, over the event type that torch has for every backend."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, KIND, enable_timing=enable_timing)

    def record(self, stream=None) -> None:
        super().record(*() if stream is None else (stream,))
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        return 1000 * (end_event._recorded - self._recorded)  # torch.Event's takes no subclass


def _adopt(stream: type, event: type) -> None:
    """Before torch 2.6 the compiler takes only descendants of two abstract classes for streams and events."""
    if hasattr(torch, "accelerator"):  # since 2.6
        return
    from torch._streambase import _EventBase, _StreamBase

    _StreamBase.register(stream)
    _EventBase.register(event)


def _generator_class(ops):
    class OfAnyDevice(type):
        def __instancecheck__(cls, instance) -> bool:
            return isinstance(instance, torch._C.Generator)

    class Generator(torch._C.Generator, metaclass=OfAnyDevice):
        def __new__(cls, device="cpu"):
            device = torch.device(device)
            if device.type != KIND:
                return torch._C.Generator(device)
            return ops.new_generator(-1 if device.index is None else device.index)

    return Generator


def _new_storage(cls, *args, device=None, **kwargs):
    """``torch.UntypedStorage(...)``, which deep copies, ``torch.load`` and ``storage.cuda()`` go through."""
    device = None if device is None else torch.device(device)
    if device is None or device.type != KIND:
        return torch._C.StorageBase.__new__(cls, *args, device=device, **kwargs)
    content = args[0] if args else 0
    if isinstance(content, int):
        tensor = torch.empty(content, dtype=torch.uint8, device=device)
    else:
        tensor = torch.tensor(content, dtype=torch.uint8, device=device)
    return tensor.untyped_storage()


def _resize_storage(ops, original):
    def resize_(self, size: int):
        if self.device.type != KIND:
            return original(self, size)
        ops.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    return resize_
