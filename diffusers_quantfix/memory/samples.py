"""What `track` records: the memory at one moment, and how a long run of moments is kept short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..placement.components import accelerators_first

__all__ = ["Recording", "Sample", "caller_of", "halved", "peak_of"]


@dataclass(frozen=True)
class Sample:
    """The memory at one moment.

    Attributes:
        seconds: since the block began.
        label: e.g. "start", "transformer begins", "transformer ends", or what `Track.mark` was given.
        allocated: device -> bytes. For accelerators what torch counts, whoever holds it; for the CPU, and where torch
            counts nothing, the sum of the components.
        peak: device -> the most bytes since the sample before; as ``allocated`` where torch counts nothing.
        components: component -> device -> bytes of its tensors.
    """

    seconds: float
    label: str
    allocated: dict[str, int]
    peak: dict[str, int]
    components: dict[str, dict[str, int]]


class Recording:
    """The samples of a run, never more than ``most``.

    When there are too many, neighbours among the samples of component calls are merged two by two, and from then on
    each sample stands for twice as many. A merged sample is the one of the two with more memory, and its ``peak`` is
    the larger of both: no peak is lost, nor which component had it. "start", "end" and marks stay, unless they are
    too many themselves.
    """

    def __init__(self, most: int) -> None:
        self.samples: list[Sample] = []
        self._most = most
        self._each = 1
        self._in_last = 0

    def add(self, sample: Sample) -> None:
        """Append a sample, or merge it into the last one."""
        is_call = bool(caller_of(sample.label))
        if is_call and 0 < self._in_last < self._each:
            self.samples[-1] = _merged(self.samples[-1], sample)
            self._in_last += 1
            return
        self.samples.append(sample)
        self._in_last = 1 if is_call else 0
        if len(self.samples) > self._most:
            self.samples = halved(self.samples)
            self._each *= 2
            self._in_last = 0


def halved(samples: Sequence[Sample]) -> list[Sample]:
    """About half as many samples, by merging neighbours; the first and the last are never merged."""
    shorter = list(_pairs_merged(samples, marks=False))
    if len(shorter) > 0.75 * len(samples):
        shorter = list(_pairs_merged(samples, marks=True))
    return shorter


def caller_of(label: str) -> str:
    """The component in "transformer begins" and "transformer ends", "" for any other label."""
    caller, _, event = label.rpartition(" ")
    return caller if event in ("begins", "ends") else ""


def peak_of(samples: Iterable[Sample]) -> dict[str, int]:
    """Device -> the most bytes in any of the samples, accelerators first."""
    most: dict[str, int] = {}
    for sample in samples:
        for device, count in sample.peak.items():
            most[device] = max(most.get(device, 0), count)
    return dict(sorted(most.items(), key=lambda item: accelerators_first(item[0])))


def _pairs_merged(samples: Sequence[Sample], marks: bool) -> Iterator[Sample]:
    index, last = 0, len(samples) - 1
    while index <= last:
        one, other = samples[index], samples[index + 1] if index < last else None
        inside = index > 0 and index + 1 < last
        if other is not None and inside and (marks or (caller_of(one.label) and caller_of(other.label))):
            yield _merged(one, other)
            index += 2
        else:
            yield one
            index += 1


def _merged(one: Sample, other: Sample) -> Sample:
    kept = max(one, other, key=_memory)
    peak = dict(one.peak)
    for device, count in other.peak.items():
        peak[device] = max(count, peak.get(device, 0))
    return replace(kept, peak=peak)


def _memory(sample: Sample) -> tuple[int, int]:
    """What decides which sample has more: accelerators before the CPU, whose bytes are often only waiting there."""
    cpu = sample.allocated.get("cpu", 0)
    return sum(sample.allocated.values()) - cpu, cpu
