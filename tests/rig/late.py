"""The devices take time: ``rig.devices(late=True)`` runs copies as late as CUDA may, and reports who did not wait.

    with rig.devices(late=True):
        weight = pinned.to("cuda:0", non_blocking=True)   # on some stream; filled with 0xFF until it must be there
        ...
    assert not rig.hazards()

While it watches, a copy between pinned memory and a device with ``non_blocking=True`` runs when its stream, or an event
behind it, is waited for, or before the next operation of its stream; pinned memory is read at that moment. Everything
else runs at once. Vector clocks of the host and of each stream say who may rely on what, by the rules of CUDA and
torch:

- The host waits for a stream in a blocking copy, ``item()``, ``nonzero`` and what needs it, and where it says so.
- Pageable memory is read before a copy to a device returns, and written before a copy from there returns.
- ``to("cpu", non_blocking=True)`` allocates pinned memory. To free pinned memory is safe, to change it is not.
- A new operation is behind what the host waited for. No stream waits for another, the default stream neither.
- Memory that was freed may be had by the next allocation on its own stream, which waits for nobody else but the streams
  named by ``record_stream``.

Two accesses to the same bytes, one of them a write, of which neither waited for the other, are a `Hazard`, whether or
not they happened in the wrong order. It names both ends as places in the program.

With ``DIFFUSERS_QUANTFIX_RIG_LATE=1`` all programs on the rig run so, and fail if there is a hazard (cases of
``verify`` only by what they compute); tests that are marked ``late(needs="diffusers>=...")`` always do, with the
package and such a release. Random programs are in `tests.late`.

    export DIFFUSERS_QUANTFIX_RIG_LATE=1
    python -m pytest tests/fixes/test_diffusers_group_offload_bnb.py    # any tests
    python -m tests.pipelines --family flux --placement "group, leaf, stream"
    python -m tests.soak
    python -m diffusers_quantfix verify --rig diffusers-group-offload-bnb

torch's own stream sanitizer is a second opinion (`tests.rig.second_opinion`): told of copies that block, it reports
the same races as this does, no others, and none in healthy programs. What the host does, and memory that is used again,
it cannot see.

Late programs need 1.10 to 1.14 times the processor time of others in the caches, the soak and the tools, 1.27 times in
the sweep of placements, and no more in pipelines and programs.

It is all in C++ (``backend/late.h``), below autograd, inference mode, threads and compiled graphs: operators of the
devices tell of their arguments in the rig's kernels, those of the host in a callback of torch's profiler.

What it cannot show: kernels that are slow (they run at once; only the order is followed), CUDA graphs, copies that
overlap in reality, how often a race is lost; what native kernels of bitsandbytes before 0.46 read and write; what the
host does to pinned memory other than through torch's operators, ``numpy()`` and ``tolist()``; two
threads of the host that race. Of a tensor the bytes from its first to its last element count, so interleaved columns
are taken for the same memory.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from . import bindings
from .undo import Undo

# A frame of these is no place in a program.
_NO_PLACES = [sys.modules[name] for name in ("torch", "_pytest", "pluggy") if name in sys.modules]


@dataclass(frozen=True)
class End:
    """One end of a hazard.

    Attributes:
        who: "host", or a stream: "device 0, default stream".
        what: the operator, and whether it reads or writes.
        frames: "file:line in function", the innermost outside of torch first; empty where no Python code ran.
    """

    who: str
    what: str
    frames: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} ({self.who})\n        at {_places(self.frames)}"


@dataclass(frozen=True)
class Hazard:
    """Two accesses to the same memory that were not put in order.

    Attributes:
        kind: "race" (two streams), "early host read", "early host write" (of what is being copied to the host),
            "changed source" (of a copy that may not have run), "reuse" (of freed memory, by an allocation on its
            stream), "early free" (the same before any allocation).
        first: the end that came first: where the copy was begun, the freed memory used.
        second: the end that did not wait for it.
        count: how often.
        bytes: of the memory, all times together.
        freed: where memory was freed that is used again, as in `End`.
    """

    kind: str
    first: End
    second: End
    count: int
    bytes: int
    freed: tuple[str, ...] = ()

    def __str__(self) -> str:
        freed = f"\n    freed at {_places(self.freed)}" if self.freed else ""
        return (
            f"{self.kind}, {self.count} times, {self.bytes} bytes\n    {self.first}{freed}\n    {self.second}"
        )


def _places(frames: tuple[str, ...]) -> str:
    return "\n        from ".join(frames) or "no Python code"


def watch(undo: Undo) -> None:
    """Let the devices take time until ``undo`` is done."""
    here = os.path.dirname(os.path.abspath(__file__))
    modules = [os.path.join(here, name) for name in os.listdir(here) if not name.startswith("test_")]
    libraries = [os.path.dirname(module.__file__) + os.sep for module in _NO_PLACES]
    torch.ops.diffusers_quantfix_rig.watch([*libraries, *sorted(modules)])
    undo.call(torch.ops.diffusers_quantfix_rig.unwatch)
    for name in ("numpy", "tolist"):
        undo.set(torch.Tensor, name, _told(getattr(torch.Tensor, name)))


def hazards() -> list[Hazard]:
    """Those since the devices were last switched on late.

    What is freed behind the end of a test is no early free.
    """
    found = [_parsed(line) for line in torch.ops.diffusers_quantfix_rig.hazards()]
    return [hazard for hazard in found if hazard.kind != "early free" or hazard.second.frames]


def _parsed(line: str) -> Hazard:
    kind, size, count, *ends, freed = line.split("\x1f")
    first, second = (End(*ends[i : i + 2], tuple(ends[i + 2].splitlines())) for i in (0, 3))
    return Hazard(kind, first, second, int(count), int(size), tuple(freed.splitlines()))


def _told(original):
    """A method of tensors that reads their memory without an operator of torch."""

    def method(self, *args, **kwargs):
        if type(self) in (torch.Tensor, torch.nn.Parameter) and self.is_cpu and self.numel():
            extent = sum((size - 1) * step for size, step in zip(self.shape, self.stride(), strict=True)) + 1
            bindings.host_reads(self.data_ptr(), extent * self.element_size())
        return original(self, *args, **kwargs)

    return method
