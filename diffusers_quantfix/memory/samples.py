"""What `track` records: the memory at one moment, and the most of it over all moments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..placement.components import accelerators_first

__all__ = ["Sample", "peak_of"]


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


def peak_of(samples: Iterable[Sample]) -> dict[str, int]:
    """Device -> the most bytes in any of the samples, accelerators first."""
    most: dict[str, int] = {}
    for sample in samples:
        for device, count in sample.peak.items():
            most[device] = max(most.get(device, 0), count)
    return dict(sorted(most.items(), key=lambda item: accelerators_first(item[0])))
