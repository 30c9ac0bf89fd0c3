"""pip's requirements files, and the output of ``pip freeze`` and ``uv pip freeze``."""

from __future__ import annotations

import os
import re

from .project import read_folder
from .reading import Reading, UnreadableInput, named_by, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# What pip freeze writes above an editable install, whose own line has no name
_EDITABLE = re.compile(r"# Editable .*\((?P<name>[\w.-]+)==(?P<version>[^)\s]+)\)")
_NAMED_URL = re.compile(r"[\w.-]+\s*(\[[^\]]*\])?\s*@")
_ARCHIVES = (".whl", ".tar.gz", ".zip")


def read_requirements(reading: Reading, file: str, text: str, folder: str, constraint: bool = False) -> None:
    """Add what a requirements file demands, nested files included.

    Args:
        reading: where to.
        file: what to call it in sentences.
        text: what it holds.
        folder: against which nested files are found.
        constraint: whether it came with ``-c``: it limits versions, and demands nothing.

    Raises:
        UnreadableInput: a line is no requirement, or a nested file cannot be read.
    """
    editable = None
    for number, line in _logical_lines(text):
        where = f"{file}, line {number}"
        if line.startswith("#"):
            editable = _EDITABLE.match(line)
            continue
        option, value = _option(line)
        if option in ("-r", "-c"):
            _nested(reading, where, folder, value, constraint or option == "-c")
        elif option == "-e":
            if editable:  # the comment knows more than the path
                reading.add(editable["name"], f"=={editable['version']}", constraint)
            else:
                _place(reading, where, folder, value)
        elif not option:
            _line(reading, where, folder, line, constraint)
        editable = None


def _line(reading: Reading, where: str, folder: str, line: str, constraint: bool) -> None:
    requirement = line.partition(" --")[
        0
    ].strip()  # --hash and other options of one requirement stand behind it
    plain = requirement.partition(";")[0].strip()
    if not _NAMED_URL.match(plain) and (
        "://" in plain or plain.startswith((".", "/", "~")) or plain.partition("#")[0].endswith(_ARCHIVES)
    ):
        _place(reading, where, folder, plain)
    else:
        reading.requirement(where, requirement, constraint)


def _option(line: str) -> tuple[str, str]:
    """("-r", value) of an option that matters, ("--other", "") of another, ("", "") of a requirement."""
    if not line.startswith("-"):
        return "", ""
    for short, long in (("-r", "--requirement"), ("-c", "--constraint"), ("-e", "--editable")):
        if line.startswith(long) and line[len(long) : len(long) + 1] in ("=", " "):
            return short, line[len(long) + 1 :].strip()
        if line.startswith(short) and not line.startswith("--"):
            return short, line[2:].strip()
    return "--other", ""  # of the installer: --index-url, --no-binary, ...


def _nested(reading: Reading, where: str, folder: str, value: str, constraint: bool) -> None:
    if "://" in value:
        raise UnreadableInput(
            f"{where}: {value} is on the network, and nothing is fetched; name a copy of it"
        )
    nested = value if os.path.isabs(value) else os.path.join(folder, value)
    if os.path.abspath(nested) in reading.files:
        return
    try:
        text = text_of(nested)
    except UnreadableInput as error:
        raise UnreadableInput(f"{where}: {error}") from None
    reading.files.add(os.path.abspath(nested))
    read_requirements(reading, nested, text, os.path.dirname(nested), constraint)


def _place(reading: Reading, where: str, folder: str, value: str) -> None:
    """A URL or a path without a name of its own; a project of this machine says what it demands."""
    name, pin = named_by(value)
    if name:
        reading.add(name, pin)
        return
    path = value.removeprefix("file://")
    path, _, extras = path.partition("[")
    if "://" in path:
        reading.notes.append(f"{where}: nobody can tell what {value} is; write `name @ {value}`")
        return
    if not read_folder(reading, os.path.join(folder, path.strip()), extras.rstrip("] ").split(",")):
        reading.notes.append(f"{where}: {value} has no pyproject.toml; what it demands is not known")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, line), continuations joined, blank lines gone; comments are lines of their own."""
    pending, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip()
        first = first if pending else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            pending += line[:-1] + " "
            continue
        line, pending = pending + line, ""
        if not line.lstrip().startswith("#"):
            line = line.partition(" #")[0]
        if line.strip():
            yield first, " ".join(line.split())
    if pending.strip():  # the file ends in a backslash
        yield first, " ".join(pending.split())
