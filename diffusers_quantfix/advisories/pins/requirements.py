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
# As pip has them
_COMMENT = re.compile(r"\s+#.*$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")


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
    for number, written in _logical_lines(text):
        where = f"{file}, line {number}"
        if written.startswith("#"):
            editable = _EDITABLE.match(written)
            continue
        line = _expanded(written)
        option, value = _option(line)
        place = _option(written)[1] or written
        if option in ("-r", "-c"):
            _nested(reading, where, folder, value, place, constraint or option == "-c")
        elif option == "-e":
            if editable:  # the comment knows more than the path
                reading.add(editable["name"], f"=={editable['version']}", constraint)
            else:
                _place(reading, where, folder, value, place)
        elif not option:
            _line(reading, where, folder, line, written, constraint)
        editable = None


def _expanded(line: str) -> str:
    """The line with its environment variables; sentences show it without, for those may hold passwords."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1]) or found[0], line)


def _line(reading: Reading, where: str, folder: str, line: str, written: str, constraint: bool) -> None:
    # --hash and other options of one requirement stand behind it
    requirement, written = (text.partition(" --")[0].strip() for text in (line, written))
    plain = requirement.partition(";")[0].strip()
    if not _NAMED_URL.match(plain) and (
        "://" in plain or plain.startswith((".", "/", "~")) or plain.partition("#")[0].endswith(_ARCHIVES)
    ):
        _place(reading, where, folder, plain, written.partition(";")[0].strip())
    else:
        reading.requirement(where, requirement, constraint, written)


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


def _nested(reading: Reading, where: str, folder: str, value: str, written: str, constraint: bool) -> None:
    if "://" in value:
        raise UnreadableInput(
            f"{where}: {written} is on the network, and nothing is fetched; name a copy of it"
        )
    nested, called = os.path.join(folder, value), os.path.join(folder, written)
    if os.path.abspath(nested) in reading.files:
        return
    try:
        text = text_of(nested, called)
    except UnreadableInput as error:
        raise UnreadableInput(f"{where}: {error}") from None
    reading.files.add(os.path.abspath(nested))
    read_requirements(reading, called, text, os.path.dirname(nested), constraint)


def _place(reading: Reading, where: str, folder: str, value: str, written: str) -> None:
    """A URL or a path without a name of its own; a project of this machine says what it demands."""
    name, pin = named_by(value)
    if name:
        reading.add(name, pin)
        return
    path = value.removeprefix("file://")
    path, _, extras = path.partition("[")
    if "://" in path:
        reading.notes.append(f"{where}: nobody can tell what {written} is; write `name @ {written}`")
        return
    if not read_folder(reading, os.path.join(folder, path.strip()), extras.rstrip("] ").split(",")):
        reading.notes.append(f"{where}: {written} has no pyproject.toml; what it demands is not known")


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
            line = _COMMENT.sub("", line)
        if line.strip():
            yield first, " ".join(line.split())
    if pending.strip():  # the file ends in a backslash
        yield first, " ".join(pending.split())
