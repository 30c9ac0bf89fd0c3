"""uv.lock, poetry.lock and pylock.toml (PEP 751)."""

from __future__ import annotations

import re

from ..ranges import either
from .files import UnreadableInput
from .reading import Place, Reading, with_all_extras
from .tables import toml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HEADER = re.compile(r"[ \t]*\[\[[ \t]*packages?[ \t]*\]\]")


def read_lock(reading: Reading, file: str, text: str) -> None:
    """Add every locked package that is for this interpreter; several locked versions count as alternatives.

    Raises:
        UnreadableInput: it is not valid TOML, has no table of packages, or has an invalid marker.
    """
    data = toml(file, text)
    packages = data.get("package", data.get("packages"))
    if not isinstance(packages, list) or not all(isinstance(package, dict) for package in packages):
        raise UnreadableInput(f"{file} has no [[package]] tables; is it a lock file of uv, poetry or pip?")
    reading.complete = True
    versions: dict[str, tuple[Place, dict[str, None]]] = {}
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    for index, package in enumerate(packages):
        reading.files.step(file)
        place = Place(file, lines[index] if len(lines) == len(packages) else None)
        name, version = package.get("name"), package.get("version")
        if not isinstance(name, str):
            raise UnreadableInput(f"{place} is a package without a name")
        marker = _marker(package)
        if marker is None:
            raise UnreadableInput(f"{place} has an invalid marker")
        if not marker or reading.is_for_here(place, name, with_all_extras(marker)):
            _, pins = versions.setdefault(name, (place, {}))
            pins[f"=={version}" if isinstance(version, str) and version else ""] = None
    for name, (place, pins) in versions.items():
        reading.add(place, name, either(pins))


def _marker(package: dict[str, Any]) -> str | None:
    """The marker of pylock.toml, of poetry (one, or one per group), of uv (one per resolution); empty for no marker,
    None for what is none.
    """
    found = package.get("marker") or package.get("markers") or package.get("resolution-markers") or ""
    if isinstance(found, dict):  # a group that is not in it has no marker
        groups = package.get("groups", list(found))
        named = isinstance(groups, list) and all(isinstance(group, str) for group in groups)
        found = [found.get(group, "") for group in groups] if named else None
    if not isinstance(found, list):
        return found if isinstance(found, str) else None
    if not all(isinstance(marker, str) for marker in found):
        return None
    return " or ".join(f"({marker})" for marker in found) if all(found) else ""
