"""`track`: the memory of a run, per device and per component, sampled at every component call."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..placement.components import components_of, is_module, readable_name
from .samples import Sample, peak_of

__all__ = ["Track", "track"]


class Track:
    """The answer of `track`, and the context manager that samples. It prints as a table."""

    def __init__(self, subject: str, components: dict[str, Any]) -> None:
        self.subject = subject
        self.samples: list[Sample] = []
        self._components = components
        self._handles: list[Any] = []
        self._inside: dict[str, int] = {}
        self._began = 0.0
        self._counted: list[str] = []

    def __enter__(self) -> Track:
        self._began = time.perf_counter()
        if self._components:
            from . import accelerators

            self._counted = accelerators.devices()
            for device in self._counted:
                accelerators.reset_peak(device)
        for name, component in self._components.items():
            self._watch(name, component)
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
        # The answer may be kept; it must not keep the models.
        self._handles, self._components = [], {}

    def mark(self, label: str) -> None:
        """Take a sample now, e.g. after moving the pipeline; ``label`` names it in the table and the picture."""
        components = self._sums()
        allocated: dict[str, int] = {}
        for counts in components.values():
            for device, count in counts.items():
                allocated[device] = allocated.get(device, 0) + count
        peak = dict(allocated)
        if self._counted:
            from . import accelerators
        for device in self._counted:
            allocated[device] = accelerators.allocated(device)
            peak[device] = max(accelerators.peak(device), allocated[device])
            accelerators.reset_peak(device)
        self.samples.append(Sample(time.perf_counter() - self._began, label, allocated, peak, components))

    @property
    def peak(self) -> dict[str, int]:
        """Device -> the most bytes at any time of the block."""
        return peak_of(self.samples)

    def table(self) -> str:
        """One line per sample, at most 80 columns wide."""
        from .track_table import track_table

        return track_table(self.subject, self.samples)

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
        """Everything, as JSON can hold it."""
        return {
            "subject": self.subject,
            "peak": self.peak,
            "samples": [asdict(sample) for sample in self.samples],
        }

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _watch(self, name: str, component: Any) -> None:
        self._inside[name] = 0
        # A VAE is used through decode(), which calls no forward of its own, but that of its decoder.
        parts = [part for part in component.children() if next(part.parameters(), None) is not None]
        for module in (component, *parts):
            if getattr(module, "_compiled_call_impl", None) is None:
                self._handles.append(module.register_forward_pre_hook(self._begins(name)))
                self._handles.append(module.register_forward_hook(self._ends(name), always_call=True))

    def _begins(self, name: str) -> Callable[..., None]:
        def before(module: Any, args: Any) -> None:
            if self._inside[name] == 0:
                self.mark(f"{name} begins")
            self._inside[name] += 1

        return before

    def _ends(self, name: str) -> Callable[..., None]:
        def after(module: Any, args: Any, output: Any) -> None:
            # A call that failed before it began (a hook raised) ends all the same.
            self._inside[name] = max(0, self._inside[name] - 1)
            if self._inside[name] == 0:
                self.mark(f"{name} ends")

        return after

    def _sums(self) -> dict[str, dict[str, int]]:
        if not self._components:
            return {}
        from ..placement.counting import component_bytes

        return component_bytes(self._components)


def track(pipe: Any) -> Track:
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

    Args:
        pipe: a diffusers pipeline, a ``torch.nn.Module`` or a dict of components.

    Returns:
        The context manager; after the block it has ``.peak``, ``.table()`` and ``.plot(path)``.

    Raises:
        TypeError: ``pipe`` is none of these.
    """
    components: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in components_of(pipe, "track").items():
        if is_module(value) and id(value) not in seen:
            seen.add(id(value))
            components[name] = value
    return Track(readable_name(pipe), components)
