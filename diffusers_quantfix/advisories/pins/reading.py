"""What was read of the inputs: a pin per distribution, and what a person has to know of what was not read."""

from __future__ import annotations

import codecs
import re

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from ..ranges import both

KINDS = "requirements files, pyproject.toml, uv.lock, poetry.lock, pylock.toml and the output of `pip freeze`"

# What a marker asks of the extras and groups that are installed
_CHOICE = re.compile(
    r"""("[^"]*"|'[^']*')\s+(not\s+)?in\s+(extras|dependency_groups)\b|\bextra\s*[!=]=\s*("[^"]*"|'[^']*')"""
)


class UnreadableInput(ValueError):
    """An input that cannot be understood; the text names the file, the line and the next step."""


class Reading:
    """Everything that the inputs say.

    Attributes:
        pins: distribution -> its pin (see `diffusers_quantfix.advisories.ranges`).
        required: the distributions that are demanded, not only limited by a constraint.
        notes: sentences about what was left out.
        complete: whether what is not named is not installed: locks and environments hold everything.
        files: the absolute names of the files that were read, against circles.
    """

    def __init__(self) -> None:
        self.pins: dict[str, str] = {}
        self.required: set[str] = set()
        self.notes: list[str] = []
        self.complete = False
        self.files: set[str] = set()

    def add(self, name: str, pin: str, constraint: bool = False) -> None:
        """Another demand; it holds together with the earlier ones."""
        name = canonicalize_name(name)
        self.pins[name] = both(self.pins[name], pin) if name in self.pins else pin
        if not constraint:
            self.required.add(name)

    def is_for_here(self, where: str, name: str, marker: str, text: str) -> bool:
        """Whether a marker is true for this interpreter; where it is not, a note says that ``text`` was left out.

        Raises:
            UnreadableInput: it is no marker.
        """
        try:
            if Marker(marker).evaluate({"extra": ""}):
                return True
        except ValueError:  # what packaging raises for a bad marker, name or comparison
            raise UnreadableInput(f"{where}: the marker of {name} cannot be understood") from None
        self.notes.append(f"{where} was left out, its marker is false here: {text}")
        return False

    def requirement(self, where: str, text: str, constraint: bool = False, written: str = "") -> None:
        """A PEP 508 requirement; ``written`` is what sentences show for it, where that is something else.

        Raises:
            UnreadableInput: it is none; ``where`` names the file and the line.
        """
        try:
            found = Requirement(text)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            raise UnreadableInput(f"{where}: {(written or text)!r} is no requirement ({reason})") from None
        if found.marker is not None and not self.is_for_here(
            where, found.name, str(found.marker), written or text
        ):
            return
        specifier = str(found.specifier)
        if found.url:
            _, specifier = named_by(found.url)
        self.add(found.name, specifier, constraint)


def with_all_extras(marker: str) -> str:
    """The marker of a project or lock file: which extras and groups are installed nobody knows, so that all count."""
    return _CHOICE.sub("python_version >= '0'", marker)


def named_by(url: str) -> tuple[str, str]:
    """The name and the specifier that a URL or path tells of: a wheel or sdist has both, ``#egg=`` the name."""
    path, _, fragment = url.partition("#")
    file = path.replace("\\", "/").rpartition("/")[2].partition("?")[0].replace("%2B", "+")
    try:
        name, version, *_ = parse_wheel_filename(file)
        return name, f"=={version}"
    except InvalidWheelFilename:
        pass
    try:
        name, version = parse_sdist_filename(file)
        return name, f"=={version}"
    except InvalidSdistFilename:
        pass
    for part in fragment.split("&"):
        key, _, value = part.partition("=")
        if key == "egg":
            return value.partition("[")[0], ""
    return "", ""


def decoded(name: str, data: bytes) -> str:
    """The text of a file; PowerShell's ``pip freeze > requirements.txt`` writes UTF-16."""
    try:
        for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            if data.startswith(mark):
                return data.decode("utf-16")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableInput(f"{name} is no UTF-8 text; save it as UTF-8") from None


def text_of(file: str, called: str = "") -> str:
    """The text of a file; ``called`` is its name in sentences, where that is another.

    Raises:
        UnreadableInput: it is not there, or is no text.
    """
    try:
        with open(file, "rb") as opened:
            return decoded(called or file, opened.read())
    except OSError as error:
        raise UnreadableInput(f"{called or file}: {error.strerror or error}") from None
