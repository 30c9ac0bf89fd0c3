"""uv.lock, poetry.lock and pylock.toml (PEP 751)."""

from __future__ import annotations

from ..ranges import either
from .project import toml
from .reading import Reading, UnreadableInput


def read_lock(reading: Reading, file: str, text: str) -> None:
    """Add every locked package; one that is locked in several versions leaves the choice between them.

    Raises:
        UnreadableInput: it is no TOML, or has no table of packages.
    """
    data = toml(file, text)
    packages = data.get("package", data.get("packages"))
    if not isinstance(packages, list) or not all(isinstance(package, dict) for package in packages):
        raise UnreadableInput(f"{file} has no [[package]] tables; is it a lock file of uv, poetry or pip?")
    reading.complete = True
    versions: dict[str, list[str]] = {}
    for package in packages:
        if "name" in package:
            pin = f"=={package['version']}" if "version" in package else ""
            versions.setdefault(str(package["name"]), []).append(pin)
    for name, pins in versions.items():
        reading.add(name, either(pins))
