"""`track`: the memory of a run, per device and per component, sampled at every component call."""

from __future__ import annotations

import math
import time
import types
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

from ..engine.locks import Lock
from ..placement.components import components_of, is_module, readable_name
from ..torch_modes import unobserved
from .samples import Recording, Sample, peak_of
from .watching import Calls

__all__ = ["Track", "track"]


# The most samples that are kept.
_MOST = 1000
# Without an interval: this many first samples are always taken, later ones only within this share of the time.
_FIRST, _SHARE = 12, 0.02
# If samples take more seconds than this on average (a model with tens of thousands of layers), even the first ones stay
# within the share.
_SLOW = 0.05
# Short calls are only counted until the last sample is this many seconds ago.
_GAP = 0.02
# A component with more children than this is watched only as a whole.
_PARTS = 32


class Track:
    """The result of `track`, and the context manager that samples. It prints as a table.

    Attributes:
        subject: the class of the tracked object.
        left_out: the number of beginnings and ends of component calls without a sample, see `track`.
        estimated: the components with at least one estimated sample, see `track`.
    """

    def __init__(self, subject: str, components: dict[str, Any], interval: float | None = None) -> None:
        self.subject = subject
        self.left_out = 0
        self._interval = interval
        self._components = components
        # Held while samples are taken or read: components may be called in several threads.
        self._lock = Lock()
        self._recording = Recording(_MOST)
        self._bytes: Any = None
        self._watched: list[Any] = []
        self._began = 0.0
        self._due = self._due_in_short_calls = 0.0
        self._taken = 0
        self._spent = 0.0
        self._counted: list[str] = []

    @property
    def samples(self) -> list[Sample]:
        """The samples in chronological order."""
        with self._lock.held:
            if self._bytes is not None and self._bytes.settle():
                self._recording.samples = [self._added_up_again(sample) for sample in self._recording.samples]
            return self._recording.samples

    @property
    def estimated(self) -> list[str]:
        """See the class."""
        with self._lock.held:
            return self._bytes.estimated if self._bytes is not None else []

    @unobserved
    def __enter__(self) -> Track:
        if self._began:
            raise RuntimeError(
                "the result of track() serves one block; call it again: with track(...) as memory"
            )
        self._began = time.perf_counter()
        if self._components:
            from ..placement.component_bytes import ComponentBytes
            from .accelerators import devices, reset_peak

            self._bytes = ComponentBytes(self._components)
            self._counted = devices()
            for device in self._counted:
                reset_peak(device)
        try:
            for name, component in self._components.items():
                self._watch(name, component)
            # Keep no reference: a component dropped inside the block must be freed.
            self._components = {}
            self._take("start", 0.0)
            return self
        except BaseException:  # `__exit__` is not called then
            self._remove_hooks()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._remove_hooks()
        with self._lock.held:
            self._take("end" if kind is None else f"{kind.__name__}")
            if self._bytes is not None and not self._bytes.estimated:
                self._bytes = None

    def _remove_hooks(self) -> None:
        try:
            for watched in self._watched:
                watched.remove()
        finally:  # once more, which is harmless: Ctrl-C may have come in the middle of one
            for watched in self._watched:
                watched.remove()
            self._watched.clear()

    def mark(self, label: str) -> None:
        """Take a sample now, e.g. after moving the pipeline; ``label`` names it in the table and the plot."""
        self._take(label, math.inf)

    def take_at_call(self, label: str) -> None:
        """Take a sample where a component is called or returns. None is taken if one is due later, or while another
        thread takes one: the call does not wait."""
        if time.perf_counter() < self._due or not self._lock.run(partial(self._take_if, label), within=0.0):
            self.left_out += 1

    def _take_if(self, label: str, is_free: bool) -> bool:
        if is_free:
            self._take(label)
        return is_free

    @unobserved
    def _take(self, label: str, seconds: float | None = None) -> None:
        """Take a sample. A complete look at a very large component may take ``seconds``, by default its time share."""
        with self._lock.held:
            began = time.perf_counter()
            if seconds is None:
                seconds = (began - self._began) * _SHARE
            components = self._bytes.now(seconds) if self._bytes is not None else {}
            self._recording.add(self._sample(began, label, components))
            now = time.perf_counter()
            self._taken += 1
            self._spent += now - began
            self._due = self._next_due(now)
            self._due_in_short_calls = max(self._due, now + _GAP) if self._interval is None else self._due

    def _sample(self, began: float, label: str, components: dict[str, dict[str, int]]) -> Sample:
        allocated = _added_up(components)
        peak = dict(allocated)
        if self._counted:
            from .accelerators import allocated as held_now
            from .accelerators import peak as highest
            from .accelerators import reset_peak
        for device in self._counted:
            allocated[device] = held_now(device)
            peak[device] = max(highest(device), allocated[device])
            reset_peak(device)
        return Sample(began - self._began, label, allocated, peak, components)

    def _added_up_again(self, sample: Sample) -> Sample:
        """``sample`` with new sums, after its estimates became exact."""
        allocated = _added_up(sample.components)
        peak = dict(allocated)
        for device in self._counted:
            allocated[device], peak[device] = sample.allocated[device], sample.peak[device]
        return replace(sample, allocated=allocated, peak=peak)

    def _next_due(self, now: float) -> float:
        """The time from which the next sample of a component call may be taken."""
        if self._interval is not None:
            return now + self._interval
        if self._taken < _FIRST and self._spent < _SLOW * self._taken:
            return now
        return self._began + self._spent / _SHARE

    @property
    def peak(self) -> dict[str, int]:
        """Device -> the most bytes at any time in the block."""
        return peak_of(self.samples)

    def table(self) -> str:
        """One line per sample, at most 80 columns wide."""
        from .track_table import track_table

        return track_table(self.subject, self.samples, self.left_out, self.estimated)

    def plot(self, path: Any) -> None:
        """Draw the memory of the block into an image file.

        Args:
            path: the file to write; the suffix (.png, .svg, .pdf) chooses the format.

        Raises:
            ImportError: matplotlib is not installed (the extra ``plot``).
            ValueError: there are no samples.
        """
        from .plot import plot

        plot({self.subject: self.samples}, path)

    def to_dict(self) -> dict[str, Any]:
        """The result in JSON types."""
        return {
            "subject": self.subject,
            "peak": self.peak,
            "left_out": self.left_out,
            "estimated": self.estimated,
            "samples": [asdict(sample) for sample in self.samples],
        }

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _watch(self, name: str, component: Any) -> None:
        calls = Calls(self, name, self._watched)
        # A VAE is used through decode(), which calls its decoder's forward, not its own.
        bearing = (part for part in component.children() if next(part.parameters(), None) is not None)
        parts = list(islice(bearing, _PARTS + 1))
        before = len(self._watched)
        if len(parts) <= _PARTS:
            for part in parts:
                calls.watch(part)
        calls.watch(component, tuple(self._watched[before:]))


def _added_up(components: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counts in components.values():
        for device, count in counts.items():
            total[device] = total.get(device, 0) + count
    return total


def track(pipe: Any, interval: float | None = None) -> Track:
    """Sample the memory of a pipeline or model during a ``with`` block, at every call of a component.

        with qf.track(pipe) as memory:
            pipe("a fox")
            pipe.to("cpu")
            memory.mark("after .to('cpu')")
        print(memory.table())
        memory.plot("memory.png")

    No thread is used: a sample is taken when a component is called and when it returns, at `Track.mark`, and at the
    beginning and end of the block. The memory of an accelerator, and its peak between two samples, come from torch,
    whose peak statistics are reset at each sample (``torch.cuda.reset_peak_memory_stats``). The calls of a component
    that is compiled in place (``module.compile()``) or inside of a function or model (torch compiles that once more
    after the block), or of a TorchScript module are not sampled, nor are those of a copy or pickle of the model made
    inside the block, in which hooks stay that do nothing: copy, save or script a model outside of it.

    The peak of an accelerator is always exact. The bytes of each component in a sample are exact, with these limits:

    - After the first 12 samples, sampling takes at most 2 % of the time. If calls take less than a millisecond, samples
      are 20 ms apart; calls in between are only counted, without the hook that sees their end.
    - A run of more than 1,000 samples is thinned by merging neighbours in pairs. No peak is lost, and neither is the
      component that caused it.
    - A component of more than 5,000 modules without offload hooks is examined completely at `Track.mark`, and whenever
      that takes at most 2 % of the time. Otherwise only the tree of modules and every 17th module's tensors are
      examined. If these do not change before the next complete examination (reading the result is one), the sample
      gets its result. If they do, the component's bytes in that sample stay an estimate, 17 times those of the
      examined modules, and ``Track.estimated`` names the component. A change of a few weights between two complete
      examinations may be missed.

    Args:
        pipe: a diffusers pipeline, a ``torch.nn.Module`` or a dict of components. Nothing in it is kept alive.
        interval: the least seconds between samples at component calls; 0 samples every call.

    Returns:
        The context manager; after the block it has ``.peak``, ``.table()`` and ``.plot(path)``.

    Raises:
        TypeError: ``pipe`` is none of these, or ``interval`` no number.
        ValueError: ``interval`` is negative.
        RuntimeError: the same result is used for a second block.
    """
    if interval is not None and (isinstance(interval, bool) or not isinstance(interval, (int, float))):
        raise TypeError(f"track() takes a number of seconds as interval, not {interval!r}")
    if interval is not None and not interval >= 0:
        raise ValueError(f"track() takes an interval of 0 or more seconds, not {interval!r}")
    components: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in components_of(pipe, "track").items():
        if is_module(value) and id(value) not in seen:
            seen.add(id(value))
            components[name] = value
    return Track(readable_name(pipe), components, interval)
