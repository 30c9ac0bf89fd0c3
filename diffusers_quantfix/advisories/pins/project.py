"""pyproject.toml: PEP 621, dependency groups, uv, poetry, and setuptools' dynamic dependencies."""

from __future__ import annotations

import os
import re
import sys

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..ranges import either
from .reading import Reading, UnreadableInput, text_of, with_all_extras

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def toml(file: str, text: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UnreadableInput: it is none; the text names the line.
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
    try:
        data: dict[str, Any] = tomllib.loads(text)
        return data
    except tomllib.TOMLDecodeError as error:
        raise UnreadableInput(f"{file}: {error}") from None


def read_project(reading: Reading, file: str, text: str) -> None:
    """Add what a project demands, with all its extras and groups.

    Raises:
        UnreadableInput: it is no TOML, or a demand cannot be understood.
    """
    project = _Project(reading, file, text)
    project.standard(None)
    project.groups()
    project.poetry()
    if not project.found:
        reading.notes.append(f"{file} names no dependency")


def read_folder(reading: Reading, folder: str, extras: list[str]) -> bool:
    """Add a project of this machine that is installed from its folder, as ``-e .[extra]``: its name, what it demands,
    and the extras that are asked for.  Returns whether there is one."""
    file = os.path.join(folder, "pyproject.toml")
    if not os.path.exists(file):
        return False
    if os.path.abspath(file) not in reading.files:
        reading.files.add(os.path.abspath(file))
        project = _Project(reading, file, text_of(file))
        project.itself()
        project.standard(extras)
        project.poetry()
    return True


class _Project:
    def __init__(self, reading: Reading, file: str, text: str) -> None:
        self.reading = reading
        self.file = file
        self.text = text
        self.data = toml(file, text)
        self.found = False

    def itself(self) -> None:
        """The name, and the version where it is written down."""
        about = self._table("project") or self._table("tool", "poetry")
        if isinstance(about.get("name"), str):
            version = about.get("version")
            self.reading.add(about["name"], f"=={version}" if isinstance(version, str) else "")

    def standard(self, extras: list[str] | None) -> None:
        """``[project]``; all extras when none are named."""
        project = self._table("project")
        self._list("project.dependencies", project.get("dependencies", []))
        for name, group in self._table("project", "optional-dependencies").items():
            if extras is None or name in extras:
                self._list(f"project.optional-dependencies.{name}", group)
        dynamic = self._table("tool", "setuptools", "dynamic").get("dependencies")
        if isinstance(dynamic, dict) and "file" in dynamic:
            from .requirements import read_requirements

            files = dynamic["file"]
            for name in [files] if isinstance(files, str) else files:
                self.found = True
                nested = os.path.join(os.path.dirname(self.file), str(name))
                read_requirements(self.reading, nested, text_of(nested), os.path.dirname(nested))
        elif "dependencies" in project.get("dynamic", ()):
            self.reading.notes.append(
                f"{self.file}: its dependencies are dynamic; check the file they come from"
            )

    def groups(self) -> None:
        """``[dependency-groups]``, and what uv keeps in its own table."""
        for name, group in self._table("dependency-groups").items():
            self._list(f"dependency-groups.{name}", group)
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
        where = self._where(rf"^\s*[\"']?{re.escape(name)}[\"']?\s*=")
        pins = []
        for entry in value if isinstance(value, list) else [value]:
            constraint = entry.get("version", "*") if isinstance(entry, dict) else entry
            if not isinstance(constraint, str):
                raise UnreadableInput(f"{where}: {name} = {value!r} is no constraint of poetry")
            if isinstance(entry, dict) and not self._is_for_here(where, f"{name} {constraint}", entry):
                continue
            try:
                pins += _alternatives(constraint)
            except (InvalidVersion, ValueError, IndexError):
                raise UnreadableInput(f"{where}: {constraint!r} is no constraint of poetry") from None
        if pins:
            for pin in pins:  # packaging has the last word
                self.reading.__class__().requirement(where, f"{name}{pin}")
            self.reading.add(name, either(pins))

    def _is_for_here(self, where: str, text: str, entry: dict[str, Any]) -> bool:
        """Whether an entry of poetry is for this interpreter."""
        limits = {key: str(entry[key]) for key in ("python", "platform", "markers") if entry.get(key)}
        markers = [with_all_extras(limits["markers"])] if "markers" in limits else []
        if "platform" in limits:
            markers.append(f"sys_platform == {limits['platform']!r}")
        name = text.partition(" ")[0]
        try:
            markers += filter(None, [_python_marker(limits.get("python", "*"))])
        except (InvalidVersion, ValueError, IndexError):
            raise UnreadableInput(f"{where}: the marker of {name} cannot be understood") from None
        said = ", ".join(f"{key} {limit}" for key, limit in limits.items())
        marker = " and ".join(f"({marker})" for marker in markers)
        return not marker or self.reading.is_for_here(where, name, marker, f"{text} ({said})")

    def _list(self, title: str, entries: Any, constraint: bool = False) -> None:
        if not isinstance(entries, list):
            raise UnreadableInput(f"{self.file}: {title} is no list of requirements")
        for entry in entries:
            if isinstance(entry, str):
                self.found = True
                self.reading.requirement(self._where(re.escape(entry)), entry, constraint)
            elif not isinstance(entry, dict):  # a dependency group may include another by a table
                raise UnreadableInput(f"{self.file}: {title} holds {entry!r}, which is no requirement")

    def _table(self, *names: str) -> dict[str, Any]:
        table: Any = self.data
        for depth, name in enumerate(names, 1):
            table = table.get(name, {})
            if not isinstance(table, dict):
                raise UnreadableInput(f"{self.file}: {'.'.join(names[:depth])} is no table")
        found: dict[str, Any] = table
        return found

    def _where(self, pattern: str) -> str:
        """The file and the line on which an entry stands; TOML readers do not keep it."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if re.search(pattern, line):
                return f"{self.file}, line {number}"
        return self.file


def _alternatives(constraint: str) -> list[str]:
    return [from_poetry(part) for part in constraint.split("||")]


def _python_marker(constraint: str) -> str:
    """A constraint of poetry on Python as a marker, empty where every Python will do.

    As poetry does, a version of one or two numbers is held against the first two of the running one: "3.9" is every
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
    """A constraint of poetry as a PEP 440 specifier: carets, tildes, bare versions, spaces for commas.

    Raises:
        ValueError: it has a version that is none.
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
    """``^0.33.1`` allows what keeps the first number that is not zero."""
    numbers = list(Version(version).release)
    place = next((i for i, number in enumerate(numbers) if number), len(numbers) - 1)
    return [f">={version}", "<" + ".".join(map(str, [*numbers[:place], numbers[place] + 1]))]
