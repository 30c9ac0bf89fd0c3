"""The file of a run: written after each figure, so that an interrupted run loses one figure and is resumed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .compare import merged
from .figure import Row

__all__ = ["Measurement", "Results", "read"]

LARGEST = 16 * 2**20  # bytes: a complete run has 0.1 MB
TEXTS, FLAGS, NUMBERS = ("what", "unit", "detail", "figure"), ("exact", "failed"), ("value", "goal", "noise")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The rows of one figure, measured once.

    Attributes:
        figure: its name.
        turn: which of the repeats it was, from 1 on.
        rows: what came out; the last one says so where the figure failed or ran out of time.
    """

    figure: str
    turn: int
    rows: tuple[Row, ...]

    @property
    def failed(self) -> bool:
        """It failed or ran out of time: a resumed run measures it again."""
        return any(row.failed for row in self.rows)


class Results:
    """What was measured so far, in a file where there is one.

    Args:
        path: the file, which is read where it exists; None: kept in memory only.
        machine: what the file says about the machine; of those only ``versions`` have to be the file's.

    Raises:
        ValueError: the file is none of these, or it was measured with other versions.
    """

    def __init__(self, path: Path | None, machine: dict[str, Any]):
        self.path, self.machine = path, machine
        self.measurements: list[Measurement] = []
        if path is None:
            return
        if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            raise ValueError(f"{path} cannot be written: its folder is not there or not writable")
        if not os.path.lexists(path):
            return
        content = _content(path)
        _rows(content, path)
        if content.get("versions") != machine.get("versions"):
            raise ValueError(f"{path} was measured with other versions: name another file, or remove it")
        self.measurements = _measurements(content, path)

    def has(self, figure: str, turn: int) -> bool:
        """Whether this figure was measured, and did not fail."""
        return any((one.figure, one.turn) == (figure, turn) and not one.failed for one in self.measurements)

    def add(self, new: Measurement, *, alone: bool = False) -> None:
        """Keep ``new`` in the place of what was there for its turn, or, ``alone``, for all of them; write the file."""
        self.measurements = [
            one
            for one in self.measurements
            if one.figure != new.figure or (not alone and one.turn != new.turn)
        ]
        self.measurements.append(new)
        self._write()

    def rows(self, figures: Iterable[str] | None = None) -> list[Row]:
        """One row for each that was measured, of these figures or of all, in the order of measurement."""
        wanted = None if figures is None else set(figures)
        names = dict.fromkeys(one.figure for one in self.measurements)
        found: list[Row] = []
        for name in names:
            if wanted is None or name in wanted:
                found += merged([one.rows for one in self.measurements if one.figure == name])
        return found

    def _write(self) -> None:
        if self.path is None:
            return
        content = {
            **self.machine,
            "rows": _as_dicts(self.rows()),
            "measurements": [
                {"figure": one.figure, "turn": one.turn, "rows": _as_dicts(one.rows)}
                for one in self.measurements
            ],
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.absolute().parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp lets nobody else read it.
            os.chmod(name, 0o644)
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise


def read(path: Path) -> list[Row]:
    """The rows of a result file.

    Raises:
        ValueError: it is none; the text is one sentence.
    """
    rows = _rows(_content(path), path)
    if not rows:
        raise ValueError(f"{path} is no result file of `--json`: it has no rows")
    twice = {row.what for row in rows if sum(other.what == row.what for other in rows) > 1}
    if twice:
        raise ValueError(f"{path} is no result file of `--json`: it has {min(twice)!r} twice")
    return rows


def _as_dicts(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) | {"met": row.verdict} for row in rows]


def _content(path: Path) -> dict[str, Any]:
    try:
        # A pipe or a device would be read for ever.
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("not a file")
        if about.st_size > LARGEST:
            raise ValueError(f"{about.st_size} bytes, more than {LARGEST}")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"a JSON {type(content).__name__}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"{path} is no result file of `--json`: {_one_line(said or type(error).__name__)}"
        ) from error
    return content


def _rows(content: dict[str, Any], path: Path) -> list[Row]:
    return [_row(one, path) for one in _list(content, "rows", path)]


def _measurements(content: dict[str, Any], path: Path) -> list[Measurement]:
    found = []
    for one in _list(content, "measurements", path):
        if not isinstance(one, dict) or not isinstance(one.get("figure"), str):
            raise ValueError(f"{path} is no result file of `--json`: a measurement names no figure")
        if type(one.get("turn")) is not int or one["turn"] < 1:
            raise ValueError(f"{path} is no result file of `--json`: a measurement has no turn")
        found.append(Measurement(one["figure"], one["turn"], tuple(_rows(one, path))))
    return found


def _list(content: dict[str, Any], name: str, path: Path) -> list[Any]:
    found = content.get(name)
    if not isinstance(found, list):
        raise ValueError(f"{path} is no result file of `--json`: it has no list of {name}")
    return found


def _row(one: object, path: Path) -> Row:
    """The row of a JSON object; what a later version may have added is left out."""
    problem = _problem(one)
    if problem or not isinstance(one, dict):
        raise ValueError(f"{path} is no result file of `--json`: {problem}")
    names = {field.name for field in dataclasses.fields(Row)}
    return Row(**{name: value for name, value in one.items() if name in names})


def _problem(one: object) -> str:
    if not isinstance(one, dict) or not isinstance(one.get("what"), str) or "value" not in one:
        return "a row has no 'what' and 'value'"
    what = _one_line(one["what"])
    for name in TEXTS:
        if not isinstance(one.get(name, ""), str):
            return f"{name!r} of {what!r} is no text"
    if not one["what"].isprintable() or not one.get("unit", "").isprintable():
        return f"{what!r} has characters that cannot be printed"
    for name in FLAGS:
        if not isinstance(one.get(name, False), bool):
            return f"{name!r} of {what!r} is neither true nor false"
    for name in NUMBERS:
        if not _is_number(one.get(name)):
            return f"{name!r} of {what!r} is no finite number"
    if (one.get("noise") or 0) < 0:
        return f"the noise of {what!r} is negative"
    return ""


def _is_number(value: object) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[:120]
