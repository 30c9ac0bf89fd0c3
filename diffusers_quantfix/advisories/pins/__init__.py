"""Versions from requirements files, project files, lock files and ``pip freeze``.

Requirements are parsed by `packaging`, tables by Python's TOML reader; these modules only find them.
Markers are evaluated for the running interpreter.
"""

from __future__ import annotations

import os

from .files import UnreadableInput, shown
from .lock import read_lock
from .project import read_project
from .reading import KINDS, Reading
from .requirements import read_requirements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Reading", "UnreadableInput", "read"]

_OTHER_KINDS = (".json", ".yml", ".yaml", ".py", ".cfg", ".whl", ".gz", ".zip")


def read(files: Iterable[str], reading: Reading | None = None) -> Reading:
    """The combined content of these files; ``-`` is standard input.

    Raises:
        UnreadableInput: a file does not exist, is not text, or has a line that is not a requirement.
    """
    reading = Reading() if reading is None else reading
    for file in files:
        if file == "-":
            read_requirements(reading, "standard input", reading.files.standard_input(), "")
            continue
        name, called = os.path.basename(file), shown(file)
        if name.endswith(_OTHER_KINDS) or name.startswith("Pipfile"):
            raise UnreadableInput(f"{called} is an unsupported kind of file; supported are {KINDS}")
        text = reading.files.given(file)
        if name.endswith(".lock") or (name.startswith("pylock.") and name.endswith(".toml")):
            read_lock(reading, called, text)
        elif name.endswith(".toml"):
            read_project(reading, file, text, read_requirements)
        else:
            read_requirements(reading, called, text, os.path.dirname(file))
    return reading
