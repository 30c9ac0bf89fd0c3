"""pip's requirements files, and the output of ``pip freeze`` and ``uv pip freeze``."""

from __future__ import annotations

import os
import re

from .files import UnreadableInput, shown
from .project import read_folder
from .reading import MAX_REQUIREMENT, Place, Reading, named_by

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# What pip freeze writes above an editable install, whose own line has no name
_EDITABLE = re.compile(r"# Editable .*\((?P<name>[\w.-]+)==(?P<version>[^)\s]+)\)")
_MAX_COMMENT = 500
_NAMED_URL = re.compile(r"[\w.-]+\s*(\[[^\]]*\])?\s*@")
_ARCHIVES = (".whl", ".tar.gz", ".zip")
# As pip has them
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_OPTIONS = (("-r", "--requirement"), ("-c", "--constraint"), ("-e", "--editable"))


def read_requirements(reading: Reading, file: str, text: str, folder: str, constraint: bool = False) -> None:
    """Add what a requirements file requires, nested files included.

    Args:
        reading: where to.
        file: what to call it in sentences.
        text: what it holds.
        folder: against which nested files are found.
        constraint: whether it came with ``-c``: it limits versions, but requires nothing.

    Raises:
        UnreadableInput: a line is not a requirement, or a nested file cannot be read.
    """
    editable = None
    for number, line in _logical_lines(text):
        reading.files.step(file)
        if reading.is_of_another_package(line):  # as nearly all lines of a large file are
            editable = None
            continue
        if line[0] == "#":
            editable = _EDITABLE.match(line) if len(line) <= _MAX_COMMENT else None
            continue
        place = Place(file, number)
        # --hash and other options of one requirement follow it
        option, value = _option(line) if line[0] == "-" else ("", line.partition(" --")[0].strip())
        if len(value) > MAX_REQUIREMENT:
            raise UnreadableInput(f"{place} has a requirement of more than {MAX_REQUIREMENT} characters")
        if option in ("-r", "-c"):
            _nested(reading, place, folder, value, constraint or option == "-c")
        elif option == "-e":
            if editable:  # the comment knows more than the path
                reading.add(place, editable["name"], f"=={editable['version']}", constraint)
            else:
                _unnamed(reading, place, folder, value)
        elif not option:
            plain = value.partition(";")[0].strip()
            if _is_place(plain):
                _unnamed(reading, place, folder, plain)
            else:
                reading.requirement(place, value, constraint)
        editable = None


def _is_place(text: str) -> bool:
    """Whether a line without its marker is a URL or a path, not the name of a package."""
    if "/" not in text and not text.startswith((".", "~")) and not text.partition("#")[0].endswith(_ARCHIVES):
        return False
    if _NAMED_URL.match(text):
        return False
    return "://" in text or text.startswith((".", "/", "~")) or text.partition("#")[0].endswith(_ARCHIVES)


def _expanded(path: str) -> str:
    """A path with environment variables expanded.  They are expanded only here, and messages show the original path:
    values may hold passwords."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1]) or found[0], path)


def _option(line: str) -> tuple[str, str]:
    """("-r", value) of an option that matters, ("--other", "") of another."""
    for short, long in _OPTIONS:
        if line.startswith(long) and line[len(long) : len(long) + 1] in ("=", " "):
            return short, line[len(long) + 1 :].strip()
        if line.startswith(short) and not line.startswith("--"):
            return short, line[2:].strip()
    return "--other", ""  # of the installer: --index-url, --no-binary, ...


def _nested(reading: Reading, place: Place, folder: str, value: str, constraint: bool) -> None:
    if "://" in value:
        raise UnreadableInput(
            f"{place}: the file that it includes is on the network, and nothing is fetched; name a copy of it"
        )
    path, called = os.path.join(folder, _expanded(value)), shown(os.path.join(folder, value))
    text = reading.files.included(place, path, called, "-c" if constraint else "-r")
    if text is not None:
        with reading.files.deeper(place):
            read_requirements(reading, called, text, os.path.dirname(path), constraint)


def _unnamed(reading: Reading, place: Place, folder: str, value: str) -> None:
    """A URL or a path without a name; a local project's requirements are read."""
    name, pin = named_by(value)
    if name:
        reading.add(place, name, pin)
        return
    reading.count += 1
    written, _, extras = value.removeprefix("file://").partition("[")
    if "://" in written:
        reading.note(place, "cannot determine this URL's package; write `name @ URL`")
        return
    path, called = (
        os.path.join(folder, part.strip(), "pyproject.toml") for part in (_expanded(written), written)
    )
    names = extras.rstrip("] ").split(",")
    problem = read_folder(reading, place, path, shown(called), names, read_requirements)
    if problem:
        reading.note(place, f"{problem}; what it requires is unknown")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, line): continuations joined, white space collapsed, trailing comments and blank lines
    removed; comment lines kept."""
    pending: list[str] = []
    first = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = " ".join(raw.split())
        if not pending:
            first = number
        if line.endswith("\\") and (pending or line[0] != "#"):
            pending.append(line[:-1])
            continue
        if pending:
            line = " ".join(" ".join([*pending, line]).split())
            pending = []
        if "#" in line and line[0] != "#":
            line = line.partition(" #")[0]
        if line:
            yield first, line
    if pending:  # the file ends in a backslash
        line = " ".join(" ".join(pending).split())
        if line:
            yield first, line
