"""`track`: the memory of a run, per device and per component, sampled at every component call."""

from __future__ import annotations

import math
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from string import Formatter
from typing import Any

from ..engine.locks import Lock
from ..placement.components import components_of, is_module, is_script, readable_name
from .samples import Recording, Sample, peak_of

__all__ = ["Track", "track"]


# The most samples that are kept.
_MOST = 1000
# Without an interval: this many first samples are always taken, later ones only within this share of the time.
_FIRST, _SHARE = 12, 0.02
# If samples take more seconds than this on average (a model with tens of thousands of layers), even the first ones stay
# within the share.
_SLOW = 0.05
# Calls shorter than _SHORT seconds are only counted, until the last sample is _GAP seconds ago.
_SHORT, _GAP = 0.001, 0.02
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
        if self._bytes is not None and self._bytes.settle():
            self._recording.samples = [self._added_up_again(sample) for sample in self._recording.samples]
        return self._recording.samples

    @property
    def estimated(self) -> list[str]:
        """See the class."""
        return self._bytes.estimated if self._bytes is not None else []

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
        except BaseException:  # `__exit__` is not called then
            self._remove_hooks()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._remove_hooks()
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

    def _take(self, label: str, seconds: float | None = None) -> None:
        """Take a sample. A complete look at a very large component may take ``seconds``, by default its time share."""
        began = time.perf_counter()
        if seconds is None:
            seconds = (began - self._began) * _SHARE
        components = self._bytes.now(seconds) if self._bytes is not None else {}
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
        self._recording.add(Sample(began - self._began, label, allocated, peak, components))
        now = time.perf_counter()
        self._taken += 1
        self._spent += now - began
        self._due = self._next_due(now)
        self._due_in_short_calls = max(self._due, now + _GAP) if self._interval is None else self._due

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
        calls = _Calls(self, name, self._watched)
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


class _Calls:
    """Samples the beginning and end of a component's calls, except calls inside another call of it.

    Args:
        track: takes the samples.
        name: the component's name.
        watched: where the hooks on the component and its parts are listed.

    Attributes:
        turn: held while hooks change and calls are counted: other threads may be calling the component.
    """

    def __init__(self, track: Track, name: str, watched: list[Any]) -> None:
        self.track = track
        self.begins, self.ends = f"{name} begins", f"{name} ends"
        self.inside = 0
        self.turn = Lock()
        self._watched = watched

    def watch(self, module: Any, parts: Sequence[Any] = ()) -> None:
        """Watch the calls of ``module``, unless it is compiled in place or TorchScript, which accepts no hooks.

        Args:
            module: the component or one of its parts.
            parts: for the component: the watched parts. Once the component itself is called, its parts are called
                inside, and are no longer watched.
        """
        if getattr(module, "_compiled_call_impl", None) is not None or is_script(module):
            return
        self._watched.append(_Watched(self, module))
        if parts:
            self._watched.append(_First(self, module, parts))

    def sample(self, label: str) -> None:
        """Take a sample, if one is due."""
        track = self.track
        if time.perf_counter() < track._due:
            track.left_out += 1
        else:
            track._take(label)


class _Hook:
    """A hook of this package. In a copy or pickle of its module, a standard library function that does nothing replaces
    it, so that the file can be loaded without this package."""

    __slots__ = ("_call",)

    def __init__(self, call: Any) -> None:
        self._call = call

    @property
    def __name__(self) -> str:  # which only torch.jit.script asks for
        raise AttributeError(
            "torch.jit.script() cannot compile a model inside of track(): do it before the block"
        )

    def __call__(self, *arguments: Any) -> None:
        import torch  # not needed where nothing with hooks is tracked

        # torch.compile, which does not ask for the hooks again, would keep one of them, or break its graph.
        if not torch.compiler.is_compiling():
            self._call(*arguments)

    def __reduce__(self) -> Any:
        of_three = getattr, (Formatter(), "check_unused_args")
        return of_three if self._call.__name__ == "_end" else (partial, (Formatter().check_unused_args, None))


class _First:
    """The hook that ends the watch of a component's parts once the component itself is called."""

    def __init__(self, calls: _Calls, module: Any, parts: Sequence[Any]) -> None:
        self._calls, self._parts = calls, parts
        self._handle: Any = None  # another thread may call the module before it is known
        self._handle = module.register_forward_pre_hook(_Hook(self._first), prepend=True)

    def remove(self) -> None:
        """Remove the hook."""
        with self._calls.turn.held:
            if self._handle is not None:
                self._handle.remove()

    def _first(self, module: Any, args: Any) -> None:
        if not self._calls.inside:
            for each in (self, *self._parts):
                each.remove()


class _Watched:
    """The hooks of one module.

    A module with short calls has one hook only, which counts them until a sample is due: two hooks per call take as
    long as a small layer. A call in another thread may have begun with hooks that were removed meanwhile.
    """

    def __init__(self, calls: _Calls, module: Any) -> None:
        self._calls = calls
        self._began = 0.0
        self._short = False
        self._counts = False
        self._counted = 0
        self._over = False
        self._handles: tuple[Any, ...] = ()
        with calls.turn.held:
            self._watch(module)

    def remove(self) -> None:
        """Remove the hooks for good."""
        with self._calls.turn.held:
            self._over = True
            self._drop()

    def _drop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        self._calls.track.left_out += 2 * self._counted
        self._counted = 0

    def _watch(self, module: Any) -> None:
        at_end = module.register_forward_hook(_Hook(self._end), always_call=True)
        self._handles = module.register_forward_pre_hook(_Hook(self._begin)), at_end
        self._counts = False

    def _begin(self, module: Any, args: Any) -> None:
        calls = self._calls
        with calls.turn.held:
            if self._over or self._counts:
                return
            # Not in `_end`: torch is iterating over those hooks then.
            if self._short and not calls.inside and time.perf_counter() < calls.track._due_in_short_calls:
                self._drop()
                self._counted = 1
                self._handles = (module.register_forward_pre_hook(_Hook(self._count)),)
                self._counts = True
                return
            calls.inside += 1
            is_outermost = calls.inside == 1
        if is_outermost:
            calls.sample(calls.begins)
            self._began = time.perf_counter()

    def _end(self, module: Any, args: Any, output: Any) -> None:
        calls = self._calls
        with calls.turn.held:
            if calls.inside > 1:
                calls.inside -= 1
                return
            # A call that failed before `_begin` (another hook raised) ends too.
            calls.inside = 0
            if self._over:
                return
        self._short = time.perf_counter() - self._began < _SHORT
        calls.sample(calls.ends)

    def _count(self, module: Any, args: Any) -> None:
        if time.perf_counter() < self._calls.track._due_in_short_calls:
            self._counted += 1
            return
        with self._calls.turn.held:
            if self._over or not self._counts:
                return
            self._drop()
            self._watch(module)
        self._begin(module, args)


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
