"""The samples that `track` records, and how a long run of them is thinned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..placement.components import accelerators_first

__all__ = ["Recording", "Sample", "caller_of", "halved", "peak_of"]


@dataclass(frozen=True)
class Sample:
    """The memory at one moment.

    Attributes:
        seconds: seconds since the block began.
        label: e.g. "start", "transformer begins", "transformer ends", or the label of `Track.mark`.
        allocated: device -> bytes. For accelerators all memory that torch counts; for the CPU, and for devices that
            torch does not count, the sum of the components.
        peak: device -> the most bytes since the previous sample; as ``allocated`` if torch does not count them.
        components: component -> device -> bytes of its tensors.
    """

    seconds: float
    label: str
    allocated: dict[str, int]
    peak: dict[str, int]
    components: dict[str, dict[str, int]]


class Recording:
    """The samples of a run, never more than ``most``.

    When there are too many, neighbouring samples of component calls are merged in pairs, and from then on each sample
    stands for twice as many. A merged sample is the one of the two with more memory, with the larger ``peak`` of both:
    no peak is lost, and neither is the component that caused it. "start", "end" and marks are kept, unless there are
    too many of them.
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
    """Merge neighbours to about half as many samples; the first and the last are never merged."""
    shorter = list(_pairs_merged(samples, marks=False))
    if len(shorter) > 0.75 * len(samples):
        shorter = list(_pairs_merged(samples, marks=True))
    return shorter


def caller_of(label: str) -> str:
    """The component in "transformer begins" and "transformer ends", "" for any other label."""
    caller, _, event = label.rpartition(" ")
    return caller if event in ("begins", "ends") else ""


def peak_of(samples: Iterable[Sample]) -> dict[str, int]:
    """Device -> the highest peak of the samples, accelerators first."""
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
    """The sort key for "more memory": accelerators before the CPU, which often only holds offloaded weights."""
    cpu = sample.allocated.get("cpu", 0)
    return sum(sample.allocated.values()) - cpu, cpu
