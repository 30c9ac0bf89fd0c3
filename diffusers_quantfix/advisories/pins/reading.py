"""What was read from the inputs: a pin per distribution, and notes about what was not read."""

from __future__ import annotations

import functools
import re

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..libraries import KNOWN
from ..ranges import both, comparable, either
from .files import Files, UnreadableInput

KINDS = "requirements files, pyproject.toml, uv.lock, poetry.lock, pylock.toml and the output of `pip freeze`"

MAX_REQUIREMENT = 4096
MAX_DEMANDS = 64
# The work on a pin is quadratic in its number of limits.
MAX_LIMITS = 50
_MAX_NOTES = 20

# What a marker asks of the extras and groups that are installed
_CHOICE = re.compile(
    r"""("[^"]*"|'[^']*')\s+(not\s+)?in\s+(extras|dependency_groups)\b|\bextra\s*[!=]=\s*("[^"]*"|'[^']*')"""
)
_VARIABLE = "${"
_NAME = r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)[ ]*(?:\[[A-Za-z0-9._, -]*\])?[ ]*"
_RELEASE = r"v?(?:\d{1,9}!)?\d{1,99}(?:\.\d{1,99})*"
_END = r"(?:(?:a|b|rc)\d{1,99})?(?:\.post\d{1,99})?(?:\.dev\d{1,99})?"
_LIMIT = (
    rf"(?:(?:==|!=)[ ]*{_RELEASE}(?:\.\*|{_END}(?:\+[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*)?)"
    rf"|[<>]=?[ ]*{_RELEASE}{_END}|~=[ ]*{_RELEASE}\.\d{{1,99}})[ ]*"
)
# Matches most lines of most files. A match is a requirement if its marker is valid; anything else is left to
# `packaging`.
_PLAIN = re.compile(rf"{_NAME}(?:{_LIMIT}(?:,[ ]*{_LIMIT})*)?(?:;([^$]+)|[ ]?--hash=.*)?$", re.ASCII)
_NAME_AND_VARIABLE = re.compile(rf"{_NAME}(?=[=!<>~$])", re.ASCII)


class Place:
    """A file, and a line in it.

    Args:
        file: its name.
        line: the number of the line; None where it has to be found first, or cannot be.
        text: the file, for a line that has to be found.
        pattern: what it looks like; TOML readers do not keep lines.
    """

    __slots__ = ("_line", "_pattern", "_text", "file")

    def __init__(self, file: str, line: int | None = None, text: str = "", pattern: str = "") -> None:
        self.file = file
        self._line = line
        self._text = text
        self._pattern = pattern

    @property
    def line(self) -> int | None:
        """The line number; None if it cannot be determined."""
        if self._line is None and self._pattern:
            found = re.search(self._pattern, self._text, re.MULTILINE)
            self._line = self._text.count("\n", 0, found.start()) + 1 if found else None
            self._pattern = ""
        return self._line

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}, line {self.line}"


class Reading:
    """Everything that the inputs say about the libraries that have advisories; other packages are only counted.

    Attributes:
        files: what may be read, and how much.
        pins: library -> its pin (see `diffusers_quantfix.advisories.ranges`).
        required: the libraries that are required, not just constrained.
        places: library -> where it was named first.
        notes: sentences about what was left out.
        complete: whether unnamed packages are not installed: locks and environments list everything.
        count: how many requirements there were, including those left out.
    """

    def __init__(self, follow_outside: bool = False) -> None:
        self.files = Files(follow_outside)
        self.required: set[str] = set()
        self.places: dict[str, Place] = {}
        self.complete = False
        self.count = 0
        self.pins: dict[str, str] = {}
        self._demands: dict[str, set[str]] = {}
        self._notes: dict[tuple[str, str], str] = {}
        self._more_notes = 0

    @property
    def notes(self) -> list[str]:
        more = [f"{self._more_notes} more notes of these kinds"] if self._more_notes else []
        return [*self._notes.values(), *more]

    def note(self, place: Place | None, what: str) -> None:
        """A sentence for the report: the first of its kind in each file, and not too many."""
        key = (place.file if place else "", what)
        if key not in self._notes and len(self._notes) < _MAX_NOTES:
            self._notes[key] = f"{place or 'installed'}: {what}"
        else:
            self._more_notes += 1

    def add(self, place: Place | None, name: str, pin: str, constraint: bool = False) -> None:
        """Add a requirement, in combination with the earlier ones.

        Raises:
            UnreadableInput: it is one too many.
        """
        self.count += 1
        name = canonicalize_name(name)
        if name not in KNOWN:
            return
        if place is not None:
            self.places.setdefault(name, place)
        if not constraint:
            self.required.add(name)
        if pin.count(",") + pin.count("||") < MAX_LIMITS:
            pin = either(self._comparable(place, name, part) for part in pin.split(" || "))
            demands = self._demands.setdefault(name, set())
            if pin in demands:
                return
            demands.add(pin)
            pin = both(self.pins[name], pin) if name in self.pins else pin
            self.pins[name] = pin
            if len(demands) <= MAX_DEMANDS and pin.count(",") + pin.count("||") < MAX_LIMITS:
                return
        raise UnreadableInput(f"{place}: more than {MAX_LIMITS} different limits on {name}")

    def is_of_another_package(self, text: str) -> bool:
        """Count a requirement in the usual form for a package without advisories; False for anything else."""
        plain = _PLAIN.match(text)
        if plain is None or canonicalize_name(plain[1]) in KNOWN:
            return False
        if plain[2] and _is_true_here(plain[2].partition(" --")[0].strip()) is None:
            return False
        self.count += 1
        return True

    def is_for_here(self, place: Place, name: str, marker: str) -> bool:
        """Whether a marker is true for this interpreter; where it is not, a note says that it was left out.

        A marker with an environment variable counts as true: it is not evaluated, because the environment may hold
        secrets.

        Raises:
            UnreadableInput: the marker is invalid.
        """
        if _VARIABLE in marker:
            return True
        answer = _is_true_here(marker)
        if answer is None:
            raise UnreadableInput(f"{place}: the marker of {_quotable(name)} is invalid")
        if not answer:
            self.count += 1
            if canonicalize_name(name) in KNOWN:
                self.note(place, f"{name} was left out, its marker is false here")
        return answer

    def requirement(self, place: Place, text: str, constraint: bool = False) -> None:
        """A PEP 508 requirement.

        Raises:
            UnreadableInput: it is none.
        """
        if len(text) > MAX_REQUIREMENT:
            raise UnreadableInput(f"{place} has a requirement of more than {MAX_REQUIREMENT} characters")
        if self.is_of_another_package(text):
            return
        parsed = _parsed(text)
        if parsed is None:
            self._not_understood(place, text, constraint)
            return
        name, specifier, url, marker = parsed
        if marker and not self.is_for_here(place, name, marker):
            return
        self.add(place, name, named_by(url)[1] if url else specifier, constraint)

    def _not_understood(self, place: Place, text: str, constraint: bool) -> None:
        found = _NAME_AND_VARIABLE.match(text) if _VARIABLE in text else None
        if found is None:
            name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text)
            about = f" (it begins with {name[0]})" if name and canonicalize_name(name[0]) in KNOWN else ""
            hint = f"; `pip freeze` has no {_VARIABLE}...}}" if _VARIABLE in text else ""
            raise UnreadableInput(f"{place} is not a requirement{about}{hint}")
        if canonicalize_name(found[1]) in KNOWN:
            self.note(place, f"the version of {found[1]} is a variable, and variables are not expanded")
        self.add(place, found[1], "", constraint)

    def _comparable(self, place: Place | None, name: str, specifier: str) -> str:
        if len(specifier) <= MAX_REQUIREMENT and comparable(specifier):
            return specifier
        self.note(place, f"the version of {name} cannot be compared")
        return ""


def with_all_extras(marker: str) -> str:
    """The marker of a project or lock file, with all extras and groups on, since the installed ones are unknown."""
    return _CHOICE.sub("python_version >= '0'", marker[: MAX_REQUIREMENT + 1])


def named_by(url: str) -> tuple[str, str]:
    """The name and specifier in a URL or path: wheels and sdists have both, ``#egg=`` has the name."""
    path, _, fragment = url.partition("#")
    file = path.replace("\\", "/").rpartition("/")[2].partition("?")[0].replace("%2B", "+")
    if file.endswith(".whl"):
        parts = file.split("-")
        if len(parts) in (5, 6) and comparable(f"=={parts[1]}"):
            return parts[0], f"=={parts[1]}"
    for ending in (".tar.gz", ".zip"):
        name, _, version = file.removesuffix(ending).rpartition("-")
        if file.endswith(ending) and name and comparable(f"=={version}"):
            return name, f"=={version}"
    for part in fragment.split("&"):
        key, _, value = part.partition("=")
        if key == "egg":
            return value.partition("[")[0], ""
    return "", ""


def _quotable(name: str) -> str:
    return name if canonicalize_name(name) in KNOWN else "a package"


# Any parse error, even a RecursionError for a thousand brackets, means that the text is not a requirement.
@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[str, str, str, str] | None:
    """(name, specifier, URL, marker) of a requirement."""
    try:
        found = Requirement(text)
        return found.name, str(found.specifier), found.url or "", str(found.marker or "")
    except Exception:
        return None


@functools.lru_cache(maxsize=1024)
def _is_true_here(marker: str) -> bool | None:
    if len(marker) > MAX_REQUIREMENT:
        return None
    try:
        return bool(Marker(marker).evaluate({"extra": ""}))
    except Exception:
        return None
