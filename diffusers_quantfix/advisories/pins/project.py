"""pyproject.toml: PEP 621, dependency groups, uv, poetry, and setuptools' dynamic dependencies."""

from __future__ import annotations

import os
import re

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..ranges import comparable, either
from .files import FOLLOW, NoFile, OutsideProject, UnreadableInput, shown
from .reading import MAX_DEMANDS, MAX_REQUIREMENT, Place, Reading, with_all_extras
from .tables import toml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    # what reads a requirements file: (reading, file, text, folder)
    RequirementsReader = Callable[[Reading, str, str, str], None]


def read_project(reading: Reading, file: str, text: str, read_requirements: RequirementsReader) -> None:
    """Add what a project requires, with all its extras and groups.

    Args:
        reading: where to.
        file: its name in sentences, to which other files are relative.
        text: its content.
        read_requirements: reads a requirements file that holds its dependencies.

    Raises:
        UnreadableInput: it is not valid TOML, or has an invalid requirement.
    """
    project = _Project(reading, file, shown(file), text)
    project.standard(None, read_requirements)
    project.groups()
    project.poetry()
    if not project.found:
        reading.note(Place(shown(file)), "it lists no dependencies")


def read_folder(
    reading: Reading,
    place: Place,
    file: str,
    called: str,
    extras: list[str],
    read_requirements: RequirementsReader,
) -> str:
    """Add a local project that is installed from its folder, as ``-e .[extra]``: its name, its requirements, and those
    of the requested extras.

    Args:
        reading: where to.
        place: the line that names the folder.
        file: the project file in the folder.
        called: its name in sentences.
        extras: the names of the extras.
        read_requirements: as for `read_project`.

    Returns:
        Why it cannot be read, as part of a sentence; empty if it was read.
    """
    try:
        text = reading.files.included(place, file, called, "-e")
    except OutsideProject:
        return f"this folder is outside the project, {FOLLOW} reads it"
    except NoFile:
        return "the folder has no pyproject.toml"
    if text is not None:
        with reading.files.deeper(place):
            project = _Project(reading, file, called, text)
            project.itself()
            project.standard(extras, read_requirements)
            project.poetry()
    return ""


class _Project:
    def __init__(self, reading: Reading, path: str, file: str, text: str) -> None:
        self.reading = reading
        self.path = path
        self.file = file
        self.text = text
        self.data = toml(file, text)
        self.found = False

    def itself(self) -> None:
        """The project's name, and its version if it is static."""
        about = self._table("project") or self._table("tool", "poetry")
        if isinstance(about.get("name"), str):
            version = about.get("version")
            pin = f"=={version}" if isinstance(version, str) and version else ""
            self.reading.add(Place(self.file), about["name"], pin)

    def standard(self, extras: list[str] | None, read_requirements: RequirementsReader) -> None:
        """``[project]``; all extras if none are named."""
        project = self._table("project")
        self._list("project.dependencies", project.get("dependencies", []))
        for name, group in self._table("project", "optional-dependencies").items():
            if extras is None or name in extras:
                self._list("project.optional-dependencies", group)
        elsewhere = self._table("tool", "setuptools", "dynamic").get("dependencies")
        dynamic = project.get("dynamic")
        if isinstance(elsewhere, dict) and "file" in elsewhere:
            names = elsewhere["file"]
            place = Place(self.file, None, self.text, r"^[ \t]*dependencies[ \t]*=")
            for name in names if isinstance(names, list) else [names]:
                if not isinstance(name, str):
                    raise UnreadableInput(f"{place}: dependencies.file is not a file name")
                self.found = True
                path = os.path.join(os.path.dirname(self.path), name)
                text = self.reading.files.included(place, path, shown(path), "-r")
                if text is not None:
                    with self.reading.files.deeper(place):
                        read_requirements(self.reading, shown(path), text, os.path.dirname(path))
        elif isinstance(dynamic, list) and "dependencies" in dynamic:
            self.reading.note(Place(self.file), "its dependencies are dynamic; check the file they come from")

    def groups(self) -> None:
        """``[dependency-groups]``, and uv's own table."""
        for group in self._table("dependency-groups").values():
            self._list("dependency-groups", group)
        uv = self._table("tool", "uv")
        self._list("tool.uv.dev-dependencies", uv.get("dev-dependencies", []))
        for name in ("constraint-dependencies", "override-dependencies"):
            self._list(f"tool.uv.{name}", uv.get(name, []), constraint=True)

    def poetry(self) -> None:
        """``[tool.poetry]`` with its groups."""
        groups = self._table("tool", "poetry", "group")
        tables = [
            self._table("tool", "poetry", "dependencies"),
            self._table("tool", "poetry", "dev-dependencies"),
        ]
        tables += [self._table("tool", "poetry", "group", name, "dependencies") for name in groups]
        for table in tables:
            for name, value in table.items():
                if name != "python":
                    self.found = True
                    self._poetry_one(name, value)

    def _poetry_one(self, name: str, value: Any) -> None:
        self.reading.files.step(self.file)
        place = Place(self.file, None, self.text, rf"^[ \t]*[\"']?{re.escape(name)}[\"']?[ \t]*=")
        pins: list[str] = []
        for entry in value if isinstance(value, list) else [value]:
            constraint = entry.get("version", "*") if isinstance(entry, dict) else entry
            if not isinstance(constraint, str):
                raise UnreadableInput(f"{place} is not a poetry constraint")
            if isinstance(entry, dict) and not self._is_for_here(place, name, entry):
                continue
            pins += _checked(place, constraint)
        if pins:
            self.reading.add(place, name, either(pins))

    def _is_for_here(self, place: Place, name: str, entry: dict[str, Any]) -> bool:
        """Whether an entry of poetry is for this interpreter."""
        limits = {key: str(entry[key]) for key in ("python", "platform", "markers") if entry.get(key)}
        markers = [with_all_extras(limits["markers"])] if "markers" in limits else []
        if "platform" in limits:
            markers.append(f"sys_platform == {limits['platform']!r}")
        try:
            markers += filter(None, [_python_marker(limits.get("python", "*"))])
        except (ValueError, IndexError):
            markers.append("")  # which is none
        marker = " and ".join(f"({marker})" for marker in markers)
        return not marker or self.reading.is_for_here(place, name, marker)

    def _list(self, title: str, entries: Any, constraint: bool = False) -> None:
        if not isinstance(entries, list):
            raise UnreadableInput(f"{self.file}: {title} is not a list of requirements")
        for entry in entries:
            self.reading.files.step(self.file)
            if isinstance(entry, str):
                self.found = True
                place = Place(self.file, None, self.text, re.escape(entry[:MAX_REQUIREMENT]) or "^")
                self.reading.requirement(place, " ".join(entry.split()), constraint)
            elif not isinstance(entry, dict):  # a dependency group may include another by a table
                raise UnreadableInput(f"{self.file}: {title} holds something that is not a requirement")

    def _table(self, *names: str) -> dict[str, Any]:
        table: Any = self.data
        for depth, name in enumerate(names, 1):
            table = table.get(name, {})
            if not isinstance(table, dict):
                raise UnreadableInput(f"{self.file}: {'.'.join(names[: min(depth, 3)])} is not a table")
        found: dict[str, Any] = table
        return found


def _checked(place: Place, constraint: str) -> list[str]:
    """The specifiers of a poetry constraint.

    Raises:
        UnreadableInput: it is none.
    """
    try:
        if len(constraint) <= MAX_REQUIREMENT:
            specifiers = _alternatives(constraint)
            if len(specifiers) <= MAX_DEMANDS and all(map(comparable, specifiers)):
                return specifiers
    except (ValueError, IndexError):
        pass
    raise UnreadableInput(f"{place} is not a poetry constraint")


def _alternatives(constraint: str) -> list[str]:
    return [from_poetry(part) for part in constraint.split("||")]


def _python_marker(constraint: str) -> str:
    """A poetry constraint on Python as a marker; empty if any Python will do.

    As in poetry, a version of one or two numbers is compared with the first two of the running one: "3.9" is every
    3.9.x.
    """
    choices = []
    for specifiers in map(SpecifierSet, _alternatives(constraint)):
        if not specifiers:
            return ""
        limits = [
            f"{'python_full_version' if limit.version.removesuffix('.*').count('.') > 1 else 'python_version'} "
            f"{limit.operator} '{limit.version}'"
            for limit in specifiers
        ]
        choices.append(" and ".join(limits))
    return " or ".join(choices)


def from_poetry(constraint: str) -> str:
    """A poetry constraint as a PEP 440 specifier: carets, tildes, bare versions, spaces for commas.

    Raises:
        ValueError: it has an invalid version.
    """
    parts: list[str] = []
    for part in _parts(constraint):
        if part == "*":
            continue
        if part[0] == "^":
            parts += _caret(part[1:])
        elif part[0] == "~" and part[1:2] != "=":
            release = part[1:].split(".")
            parts.append(f"~={part[1:]}" if len(release) > 2 else f"=={part[1:]}.*")
        elif part[0] == "=" and part[1:2] != "=":
            parts.append(f"={part}")
        else:
            parts.append(part if part[0] in "<>=!~" else f"=={part}")
    return ",".join(parts)


def _parts(constraint: str) -> Iterator[str]:
    yield from re.sub(r"([<>=!~^])\s+", r"\1", constraint).replace(",", " ").split()


def _caret(version: str) -> list[str]:
    """``^0.33.1`` allows versions with the same first non-zero number."""
    numbers = list(Version(version).release)
    place = next((i for i, number in enumerate(numbers) if number), len(numbers) - 1)
    return [f">={version}", "<" + ".".join(map(str, [*numbers[:place], numbers[place] + 1]))]
