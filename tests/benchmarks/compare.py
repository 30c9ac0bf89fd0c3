"""Two result files side by side: which goals are missed, and what grew by more than its noise."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence

from .figure import Row

__all__ = ["compared", "merged"]


def merged(repeats: Sequence[Sequence[Row]]) -> list[Row]:
    """One row for each that was measured several times: the median, and as its noise how far the values are apart."""
    # The latest of each: what one repeat did not come to is in another.
    latest = {row.what: row for rows in repeats for row in rows}
    found = []
    for what, row in latest.items():
        values = [one.value for rows in repeats for one in rows if one.what == what and one.value is not None]
        if len(values) > 1:
            noise = max(values) - min(values)
            row = dataclasses.replace(row, value=statistics.median(values), noise=noise)
        failures = [one for rows in repeats for one in rows if one.what == what and one.failed]
        found.append(failures[-1] if failures else row)
    return found


def compared(old: Iterable[Row], new: Iterable[Row]) -> Iterator[tuple[str, bool]]:
    """A line for each row of either side, and whether it is a reason to fail.

    That is what failed, a goal that is missed, a value that grew by more than the noise of both sides, and one that is
    gone. Of a row that was measured once no growth can be told, unless it is a count. Figures of other packages are
    only shown.
    """
    before = {row.what: row for row in old}
    for row in new:
        yield _line(before.pop(row.what, None), row)
    for row in before.values():
        judged = row.value is not None and _is_ours(row)
        yield f"{row.what:<76} {_value(row):>12} {'-':>12}  {'gone' if judged else ''}".rstrip(), judged


def _line(old: Row | None, new: Row) -> tuple[str, bool]:
    said, fails = "", False
    if new.failed:
        said, fails = "".join(letter if letter.isprintable() else " " for letter in new.detail)[:200], True
    elif new.verdict == "no":
        said, fails = f"misses its goal of {new.goal:g}", True
    elif old is not None and old.value is not None and new.value is None and _is_ours(old):
        said, fails = "not measured any more", True
    elif old is not None and old.value is not None and new.value is not None and _is_ours(new):
        noise = _noise(old, new)
        grown = new.value - old.value
        if noise is None:
            said = "noise not measured, see --repeat" if grown > 0 else ""
        elif grown > noise + 1e-9:
            said, fails = f"grew by {grown:.3g}, its noise is {noise:.3g}", True
    before = _value(old) if old is not None else "-"
    return f"{new.what:<76} {before:>12} {_value(new):>12}  {said}".rstrip(), fails


def _noise(old: Row, new: Row) -> float | None:
    """How much further apart two values may be than in each of both measurements."""
    known = [row.noise for row in (old, new) if row.noise is not None]
    if len(known) == 2:
        return sum(known)
    return 0.0 if new.unit in ("", "bytes", "%") else None


def _is_ours(row: Row) -> bool:
    return row.goal is not None or (row.unit == "x" and "peer" not in row.what)


def _value(row: Row) -> str:
    return "-" if row.value is None else f"{row.value:.3g} {row.unit}".strip()
