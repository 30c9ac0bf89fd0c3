"""`track`: the memory of a run, per device and per component, sampled at every component call."""

from __future__ import annotations

import time
import types
from dataclasses import asdict
from itertools import islice
from typing import Any

from ..placement.components import components_of, is_module, readable_name
from .samples import Recording, Sample, peak_of

__all__ = ["Track", "track"]


# So many samples are kept at most.
_MOST = 1000
# Without an interval of the caller's: the first samples are taken whatever they cost, and after them as many as take
# this share of the time.
_FIRST, _SHARE = 12, 0.03
# Samples that take more seconds than this on average are those of a model with tens of thousands of layers. Even the
# first of them have to stay within the share.
_SLOW = 0.05
# A component with more parts than this is called as a whole.
_PARTS = 32


class Track:
    """The answer of `track`, and the context manager that samples. It prints as a table.

    Attributes:
        subject: the class of what is tracked.
        left_out: how many beginnings and ends of component calls have no sample of their own, see `track`.
    """

    def __init__(self, subject: str, components: dict[str, Any], interval: float | None = None) -> None:
        self.subject = subject
        self.left_out = 0
        self._interval = interval
        self._components = components
        self._recording = Recording(_MOST)
        self._bytes: Any = None
        self._handles: list[Any] = []
        self._began = 0.0
        self._due = 0.0
        self._taken = 0
        self._spent = 0.0
        self._counted: list[str] = []

    @property
    def samples(self) -> list[Sample]:
        """What was recorded, in the order of time."""
        return self._recording.samples

    def __enter__(self) -> Track:
        self._began = time.perf_counter()
        if self._components:
            from ..placement.counting import ComponentBytes
            from .accelerators import devices, reset_peak

            self._bytes = ComponentBytes(self._components)
            self._counted = devices()
            for device in self._counted:
                reset_peak(device)
        for name, component in self._components.items():
            self._watch(name, component)
        # What a pipeline gives up inside the block has to be free to go.
        self._components = {}
        self.mark("start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self.mark("end" if kind is None else f"{kind.__name__}")
        self._handles, self._bytes = [], None

    def mark(self, label: str) -> None:
        """Take a sample now, e.g. after moving the pipeline; ``label`` names it in the table and the picture."""
        began = time.perf_counter()
        components = self._bytes.now() if self._bytes is not None else {}
        allocated: dict[str, int] = {}
        for counts in components.values():
            for device, count in counts.items():
                allocated[device] = allocated.get(device, 0) + count
        peak = dict(allocated)
        if self._counted:
            from .accelerators import allocated as held_now
            from .accelerators import peak as highest
            from .accelerators import reset_peak
        for device in self._counted:
            allocated[device] = held_now(device)
            peak[device] = max(highest(device), allocated[device])
            reset_peak(device)
        self._recording.add(Sample(began - self._began, label, allocated, peak, components))
        now = time.perf_counter()
        self._taken += 1
        self._spent += now - began
        self._due = self._next_due(now)

    def _next_due(self, now: float) -> float:
        """When the next sample of a component call may be taken."""
        if self._interval is not None:
            return now + self._interval
        if self._taken < _FIRST and self._spent < _SLOW * self._taken:
            return now
        return self._began + self._spent / _SHARE

    @property
    def peak(self) -> dict[str, int]:
        """Device -> the most bytes at any time of the block."""
        return peak_of(self.samples)

    def table(self) -> str:
        """One line per sample, at most 80 columns wide."""
        from .track_table import track_table

        return track_table(self.subject, self.samples, self.left_out)

    def plot(self, path: Any) -> None:
        """Draw the memory of the block into a picture file.

        Args:
            path: where to write it; the suffix (.png, .svg, .pdf) chooses the format.

        Raises:
            ImportError: matplotlib is not installed (the extra ``plot``).
            ValueError: nothing was sampled.
        """
        from .plot import plot

        plot({self.subject: self.samples}, path)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            "subject": self.subject,
            "peak": self.peak,
            "left_out": self.left_out,
            "samples": [asdict(sample) for sample in self.samples],
        }

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _watch(self, name: str, component: Any) -> None:
        calls = _Calls(self, name)
        # A VAE is used through decode(), which calls no forward of its own, but that of its decoder.
        bearing = (part for part in component.children() if next(part.parameters(), None) is not None)
        parts = list(islice(bearing, _PARTS + 1))
        if len(parts) <= _PARTS:
            for part in parts:
                calls.watch(part)
        of_parts = list(calls.handles)
        calls.watch(component, of_parts)
        self._handles += calls.handles


class _Calls:
    """The hooks of one component: a sample where a call begins that is not inside another, and where it ends.

    Args:
        track: which samples.
        name: of the component.

    Attributes:
        handles: of the hooks.
    """

    def __init__(self, track: Track, name: str) -> None:
        self._track = track
        self._begins, self._ends = f"{name} begins", f"{name} ends"
        self._inside = 0
        self.handles: list[Any] = []

    def watch(self, module: Any, of_parts: list[Any] | None = None) -> None:
        """Watch the calls of ``module``, unless it was compiled in place.

        Args:
            of_parts: hooks to remove once ``module`` is called itself: it is the component, used as a whole, and its
                parts are called inside.
        """
        if getattr(module, "_compiled_call_impl", None) is not None:
            return
        begins = module.register_forward_pre_hook(self._begin)
        self.handles += [begins, module.register_forward_hook(self._end, always_call=True)]
        if of_parts:

            def first(module: Any, args: Any) -> None:
                if not self._inside:
                    for handle in (here, *of_parts):
                        handle.remove()

            here = module.register_forward_pre_hook(first, prepend=True)
            self.handles.append(here)

    # Both run at every call, however short it is.
    def _begin(self, module: Any, args: Any) -> None:
        self._inside += 1
        if self._inside == 1:
            self._sample(self._begins)

    def _end(self, module: Any, args: Any, output: Any) -> None:
        if self._inside > 1:
            self._inside -= 1
            return
        # A call that failed before it began (a hook raised) ends all the same.
        self._inside = 0
        self._sample(self._ends)

    def _sample(self, label: str) -> None:
        track = self._track
        if time.perf_counter() < track._due:
            track.left_out += 1
        else:
            track.mark(label)


def track(pipe: Any, interval: float | None = None) -> Track:
    """Sample the memory of a pipeline or model during a ``with`` block, at every call of a component.

        with qf.track(pipe) as memory:
            pipe("a fox")
            pipe.to("cpu")
            memory.mark("after .to('cpu')")
        print(memory.table())
        memory.plot("memory.png")

    There is no thread: a sample is taken when a component is called and when it returns, at `Track.mark`, and at both
    ends of the block. What an accelerator holds is asked of torch, the peak between two samples as well, for which
    torch's peak statistics are reset (``torch.cuda.reset_peak_memory_stats``). A component that was compiled in place
    (``module.compile()``) is not sampled at its calls.

    Every sample looks at every tensor, which takes microseconds per layer. Calls that are shorter than that are not
    all sampled: after the first 12 samples as many are taken as need 3 % of the time. A run of more than 1,000
    samples is thinned, neighbours are merged two by two. Neither loses a peak of an accelerator, and merging loses
    none of the CPU.

    Args:
        pipe: a diffusers pipeline, a ``torch.nn.Module`` or a dict of components. Nothing in it is kept alive.
        interval: take samples at component calls at least so many seconds apart; 0 for a sample at every call.

    Returns:
        The context manager; after the block it has ``.peak``, ``.table()`` and ``.plot(path)``.

    Raises:
        TypeError: ``pipe`` is none of these.
        ValueError: ``interval`` is negative.
    """
    if interval is not None and not interval >= 0:
        raise ValueError(f"track() takes an interval of 0 or more seconds, not {interval!r}")
    components: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in components_of(pipe, "track").items():
        if is_module(value) and id(value) not in seen:
            seen.add(id(value))
            components[name] = value
    return Track(readable_name(pipe), components, interval)
