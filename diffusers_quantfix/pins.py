"""Versions from requirements files, project files, lock files and `pip freeze`.

Each requirement is parsed by `packaging`; this module only finds them.  Markers are evaluated for the running
interpreter.
"""

from __future__ import annotations

import os
import sys

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any


class UnreadableInput(ValueError):
    """An input that cannot be understood; the text names the file, the line and the next step."""


def read_pins(file: str) -> dict[str, str]:
    """Distribution -> specifier, of one file or ``-`` for standard input.

    Raises:
        UnreadableInput: the file is not there, is no text, or has a line that is no requirement.
    """
    name = os.path.basename(file)
    if file == "-":
        return _merged(_requirements("standard input", sys.stdin.read(), "", []))
    text = _text(file)
    if name in ("uv.lock", "poetry.lock"):
        return _lock(file, text)
    if name.endswith(".toml"):
        return _merged(_project(file, text))
    return _merged(_requirements(file, text, os.path.dirname(file), [os.path.abspath(file)]))


def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8-sig") as opened:
            return opened.read()
    except OSError as error:
        raise UnreadableInput(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UnreadableInput(f"{file} is no UTF-8 text; save it as UTF-8") from None


def _requirements(file: str, text: str, folder: str, seen: list[str]) -> Iterator[Requirement]:
    """The requirements of a pip requirements file, nested files included."""
    for number, line in _logical_lines(text):
        word, _, rest = line.partition("=") if line.startswith("--") else line.partition(" ")
        if line.startswith("-"):
            short = line[:2] in ("-r", "-c", "-e")
            option = line[:2] if short else word.partition(" ")[0]
            value = line[2:].strip() if short else (rest or word.partition(" ")[2]).strip()
            if option in ("-r", "-c", "--requirement", "--constraint"):
                nested = value if os.path.isabs(value) else os.path.join(folder, value)
                if os.path.abspath(nested) in seen:
                    continue
                where = f"{file}, line {number}"
                try:
                    inner = _text(nested)
                except UnreadableInput as error:
                    raise UnreadableInput(f"{where}: {error}") from None
                seen.append(os.path.abspath(nested))
                yield from _requirements(nested, inner, os.path.dirname(nested), seen)
            elif option in ("-e", "--editable"):
                yield from _from_url(value)
            continue  # options of the installer: --index-url, --hash, --no-binary, ...
        if "://" in line.partition(";")[0] and " @ " not in line:
            yield from _from_url(line.partition(" ")[0])
            continue
        # --hash and other options of one requirement stand behind it
        requirement = line.partition(" --")[0].strip()
        if requirement.startswith((".", "/")) or requirement.endswith((".whl", ".tar.gz", ".zip")):
            yield from _from_url(requirement)
            continue
        yield from _requirement(f"{file}, line {number}", requirement)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, line), continuations joined, comments and blank lines gone."""
    pending, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip()
        first = first if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        line, pending = pending + line, ""
        if line.lstrip().startswith("#"):
            continue
        line = line.partition(" #")[0].strip()
        if line:
            yield first, " ".join(line.split())


def _requirement(where: str, text: str) -> Iterator[Requirement]:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise UnreadableInput(f"{where}: {text!r} is no requirement ({reason})") from None
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        yield requirement


def _from_url(url: str) -> Iterator[Requirement]:
    """What a bare URL or path says of itself: a wheel's name has the version, ``#egg=`` the name."""
    path, _, fragment = url.partition("#")
    try:
        name, version, _, _ = parse_wheel_filename(os.path.basename(path).replace("%2B", "+"))
        yield Requirement(f"{name}=={version}")
        return
    except InvalidWheelFilename:
        pass
    for part in fragment.split("&"):
        key, _, value = part.partition("=")
        if key == "egg":
            yield Requirement(value.partition("[")[0])


def _project(file: str, text: str) -> Iterator[Requirement]:
    """``[project]`` with its optional dependencies, ``[dependency-groups]``, and ``[tool.poetry]``."""
    data = _toml(file, text)
    project = data.get("project", {})
    groups = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    groups += data.get("dependency-groups", {}).values()
    for group in groups:
        for entry in group:
            if isinstance(entry, str):  # a dependency group may include another by a table
                yield from _requirement(file, entry)
    poetry = data.get("tool", {}).get("poetry", {})
    tables = [
        poetry.get("dependencies", {}),
        *(g.get("dependencies", {}) for g in poetry.get("group", {}).values()),
    ]
    for table in tables:
        for name, value in table.items():
            constraint = value.get("version", "*") if isinstance(value, dict) else value
            if name != "python" and isinstance(constraint, str):
                yield from _requirement(file, f"{name}{_from_poetry(constraint)}")


def _from_poetry(constraint: str) -> str:
    """Poetry's caret, tilde and bare versions as PEP 440."""
    parts = []
    for part in constraint.replace(" ", "").split(","):
        if part in ("", "*"):
            continue
        if part[0] == "^":
            parts += _caret(part[1:])
        elif part[0] == "~" and part[1:2] != "=":
            release = part[1:].split(".")
            parts.append(f"~={part[1:]}" if len(release) > 2 else f"=={part[1:]}.*")
        else:
            parts.append(part if part[0] in "<>=!~" else f"=={part}")
    return ",".join(parts)


def _caret(version: str) -> list[str]:
    """``^0.33.1`` allows what keeps the first number that is not zero."""
    numbers = [int(number) for number in version.split(".") if number.isdigit()]
    place = next((i for i, number in enumerate(numbers) if number), len(numbers) - 1)
    return [f">={version}", "<" + ".".join(map(str, [*numbers[:place], numbers[place] + 1]))]


def _lock(file: str, text: str) -> dict[str, str]:
    """``[[package]]`` tables of uv.lock and poetry.lock."""
    packages = _toml(file, text).get("package", [])
    if not isinstance(packages, list):
        raise UnreadableInput(f"{file} has no [[package]] tables: is it a lock file of uv or poetry?")
    return {
        canonicalize_name(package["name"]): f"=={package['version']}"
        for package in packages
        if "name" in package and "version" in package
    }


def _toml(file: str, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise UnreadableInput(f"{file}: Python 3.10 has no TOML reader; pip install tomli") from None
    try:
        data: dict[str, Any] = tomllib.loads(text)
        return data
    except tomllib.TOMLDecodeError as error:
        raise UnreadableInput(f"{file}: {error}") from None


def _merged(requirements: Iterable[Requirement]) -> dict[str, str]:
    """One specifier per distribution: a constraint and a requirement hold together."""
    pins: dict[str, str] = {}
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        specifiers = [pins[name]] if pins.get(name) else []
        if requirement.url:
            specifiers += [str(found.specifier) for found in _from_url(requirement.url)]
        if str(requirement.specifier):
            specifiers.append(str(requirement.specifier))
        pins[name] = ",".join(specifiers)
    return pins
