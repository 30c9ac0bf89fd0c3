"""The samples of a run as a table of at most 80 columns."""

from __future__ import annotations

from ..text import WIDTH, human, wrapped
from .samples import caller_of, peak_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .samples import Sample

__all__ = ["track_table"]

_COLUMN = 11
# How many samples are shown at the beginning and end of a long run of calls of one component.
_FIRST, _LAST = 4, 2


def track_table(
    subject: str, samples: Sequence[Sample], left_out: int = 0, estimated: Sequence[str] = ()
) -> str:
    """One line per sample: seconds, label, and per device the bytes and the peak since the previous sample."""
    if not samples:
        return f"{subject}: nothing was sampled"
    peaks = peak_of(samples)
    devices = [device for device, count in peaks.items() if count] or list(peaks)
    columns: list[tuple[str, str]] = []
    for device in devices:
        columns.append((device, "allocated"))
        if device != "cpu":
            columns.append((device, "peak"))
    columns = columns[: (WIDTH - 34) // _COLUMN]
    head = "".join(f"{device if kind == 'allocated' else 'peak':>{_COLUMN}}" for device, kind in columns)
    lines = [subject, f"{'seconds':>8}  {'':<24}{head}"]
    for sample in _condensed(samples):
        if isinstance(sample, str):
            lines.append(f"{'':>10}{sample}")
            continue
        cells = "".join(
            f"{human(getattr(sample, kind).get(device, 0)):>{_COLUMN}}" for device, kind in columns
        )
        lines.append(f"{sample.seconds:>8.2f}  {_short(sample.label):<24}{cells}")
    peak = ", ".join(f"{human(peaks[device])} on {device}" for device in devices)
    lines.append(f"peak: {peak}" if peak else "peak: no memory")
    if left_out:
        lines.append(f"{left_out} beginnings and ends of calls without a sample")
    if estimated:
        lines += wrapped(f"some bytes of {', '.join(estimated)} are estimates, see `track`", "", "  ")
    return "\n".join(lines)


def _condensed(samples: Sequence[Sample]) -> list[Sample | str]:
    shown: list[Sample | str] = []
    run: list[Sample] = []
    for sample in [*samples, None]:
        if run and (
            sample is None
            or caller_of(sample.label) != caller_of(run[0].label)
            or not caller_of(run[0].label)
        ):
            left_out = len(run) - _FIRST - _LAST
            shown += run if left_out < 2 else [*run[:_FIRST], f"... {left_out} more samples", *run[-_LAST:]]
            run = []
        if sample is not None:
            run.append(sample)
    return shown


def _short(label: str) -> str:
    return label if len(label) <= 23 else label[:20] + "..."
