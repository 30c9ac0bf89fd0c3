"""The samples of a run as a table of at most 80 columns."""

from __future__ import annotations

import re

from ..text import WIDTH, human

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .tracking import Sample, Track

__all__ = ["track_table"]

_COLUMN = 11
_FIRST, _LAST = 4, 2  # of a long run of calls of one component, so many samples are shown


def track_table(track: Track) -> str:
    """One line per sample: seconds, what happened, and per device the bytes and the peak since the line before."""
    if not track.samples:
        return f"{track.subject}: nothing was sampled"
    devices = [device for device, count in track.peak.items() if count] or list(track.peak)
    columns: list[tuple[str, str]] = []
    for device in devices:
        columns.append((device, "allocated"))
        if device != "cpu":
            columns.append((device, "peak"))
    columns = columns[: (WIDTH - 34) // _COLUMN]
    head = "".join(f"{device if kind == 'allocated' else 'peak':>{_COLUMN}}" for device, kind in columns)
    lines = [track.subject, f"{'seconds':>8}  {'':<24}{head}"]
    for sample in _condensed(track.samples):
        if isinstance(sample, str):
            lines.append(f"{'':>10}{sample}")
            continue
        cells = "".join(
            f"{human(getattr(sample, kind).get(device, 0)):>{_COLUMN}}" for device, kind in columns
        )
        lines.append(f"{sample.seconds:>8.2f}  {_short(sample.label):<24}{cells}")
    peak = ", ".join(f"{human(track.peak[device])} on {device}" for device in devices)
    return "\n".join([*lines, f"peak: {peak}" if peak else "peak: no memory"])


def _condensed(samples: list[Sample]) -> list[Sample | str]:
    shown: list[Sample | str] = []
    run: list[Sample] = []
    for sample in [*samples, None]:
        if run and (
            sample is None or _caller(sample.label) != _caller(run[0].label) or not _caller(run[0].label)
        ):
            left_out = len(run) - _FIRST - _LAST
            shown += run if left_out < 2 else [*run[:_FIRST], f"... {left_out} more samples", *run[-_LAST:]]
            run = []
        if sample is not None:
            run.append(sample)
    return shown


def _caller(label: str) -> str:
    found = re.fullmatch(r"(.+) (begins|ends)", label)
    return found.group(1) if found else ""


def _short(label: str) -> str:
    return label if len(label) <= 23 else label[:20] + "..."
