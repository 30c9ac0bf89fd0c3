"""uv.lock, poetry.lock and pylock.toml (PEP 751)."""

from __future__ import annotations

import re

from ..ranges import either
from .project import toml
from .reading import Reading, UnreadableInput, with_all_extras

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def read_lock(reading: Reading, file: str, text: str) -> None:
    """Add every locked package that is for this interpreter; one that is locked in several versions leaves the choice
    between them.

    Raises:
        UnreadableInput: it is no TOML, has no table of packages, or a marker cannot be understood.
    """
    data = toml(file, text)
    packages = data.get("package", data.get("packages"))
    if not isinstance(packages, list) or not all(isinstance(package, dict) for package in packages):
        raise UnreadableInput(f"{file} has no [[package]] tables; is it a lock file of uv, poetry or pip?")
    reading.complete = True
    versions: dict[str, list[str]] = {}
    lines = [
        n for n, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*packages?\s*\]\]", line)
    ]
    for index, package in enumerate(packages):
        if "name" in package:
            name = str(package["name"])
            pin = f"=={package['version']}" if "version" in package else ""
            where = f"{file}, line {lines[index]}" if len(lines) == len(packages) else f"{file}: {name}"
            marker = _marker(package)
            everything = with_all_extras(marker)
            if not marker or reading.is_for_here(where, name, everything, f"{name}{pin}; {marker}"):
                versions.setdefault(name, []).append(pin)
    for name, pins in versions.items():
        reading.add(name, either(pins))


def _marker(package: dict[str, Any]) -> str:
    """The marker of pylock.toml, of poetry (one, or one per group), of uv (one per resolution); empty for none."""
    found = package.get("marker") or package.get("markers") or package.get("resolution-markers") or ""
    if isinstance(found, dict):  # a group that is not named in it has none
        found = [found.get(group, "") for group in package.get("groups", found)]
    if not isinstance(found, list):
        return str(found)
    return " or ".join(f"({marker})" for marker in found) if all(found) else ""
