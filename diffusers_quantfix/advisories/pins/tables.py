"""TOML, as used in project files and lock files."""

from __future__ import annotations

import re
import sys

from .files import UnreadableInput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Python's reader recurses for nested brackets, and is quadratic in the parts of a dotted key: both are counted first.
MAX_DEPTH = 50
MAX_PARTS = 50
MAX_MARKS = 500_000

_MARK = re.compile(
    r"""\"{3}|'{3}|"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|'[^'\n]*'?|\#[^\n]*|[\[\]{}.]|[=,\n]""", re.VERBOSE
)
_ENDS = {'"""': re.compile(r'\\.|"""', re.DOTALL), "'''": re.compile("'''")}


def toml(file: str, text: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UnreadableInput: it is not valid TOML, or not what people or tools write; the text names the line.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise UnreadableInput(
                f"{file}: Python 3.10 has no TOML reader; install diffusers-quantfix[check]"
            ) from None
    _check_shape(file, text)
    try:
        data: dict[str, Any] = tomllib.loads(text)
        return data
    # a ValueError of `int` for too many digits, too
    except (ValueError, RecursionError) as error:
        place = re.search(r"\(at [^()]*\)$", str(error))  # the rest may quote the file
        raise UnreadableInput(f"{file} is not valid TOML{' ' + place[0] if place else ''}") from None


def _check_shape(file: str, text: str) -> None:
    depth = parts = marks = position = 0
    while True:
        found = _MARK.search(text, position)
        if found is None:
            return
        position = found.end()
        mark = found[0]
        if mark in _ENDS:
            position = _end_of_string(text, position, _ENDS[mark])
        elif mark == ".":
            parts += 1
            marks += 1
        elif mark in "[{":
            depth += 1
            marks += 1
            parts = 0
        elif mark in "]}":
            depth = max(depth - 1, 0)
            parts = 0
        elif mark in "=,\n":
            parts = 0
        if depth > MAX_DEPTH or parts > MAX_PARTS or marks > MAX_MARKS:
            line = text.count("\n", 0, position) + 1
            what = (
                f"more than {MAX_DEPTH} brackets inside each other"
                if depth > MAX_DEPTH
                else f"a key of more than {MAX_PARTS} parts"
                if parts > MAX_PARTS
                else f"more than {MAX_MARKS} tables and lists"
            )
            raise UnreadableInput(f"{file}, line {line} has {what}")


def _end_of_string(text: str, position: int, end: re.Pattern[str]) -> int:
    while True:
        found = end.search(text, position)
        if found is None:
            return len(text)
        position = found.end()
        if found[0][0] != "\\":
            return position
