"""The setting that ``enable`` and ``disable`` write, and how `status` prints it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import stat
import sys
from typing import Any

MODULE = "diffusers_quantfix_startup"


def describe() -> str:
    """Whether and how the package is activated at the start of this environment's interpreter, as a sentence."""
    if importlib.util.find_spec(MODULE) is None:
        return f"no start-up file: the package is not installed in {environment()}"
    startup = _start_up()
    by = startup.chosen()
    if by == "variable":
        return f"at every start, by {startup.VARIABLE}={os.environ[startup.VARIABLE]}"
    if by == "enable":
        return f"at every start of {_place_of(startup.CHOICE)}, by `python -m diffusers_quantfix enable`"
    misunderstood = startup.misunderstood()
    if misunderstood:
        return f"off: {misunderstood}"
    if os.environ.get(startup.VARIABLE):
        return f"off, by {startup.VARIABLE}={os.environ[startup.VARIABLE]}"
    return "only where it is imported; `python -m diffusers_quantfix enable` activates it at every start"


def _start_up() -> Any:
    """The module of the start-up files that knows how activation is enabled."""
    try:
        return importlib.import_module(f"{MODULE}.enabled")
    except ModuleNotFoundError:
        # An editable install may have start-up files from an older version, when they were a single module.
        return importlib.import_module(MODULE)


def environment() -> str:
    """This interpreter's environment by name, for a sentence."""
    kind = "the environment" if sys.prefix != sys.base_prefix else "the Python installation"
    return f"{kind} {sys.prefix}"


def _place_of(choice: str) -> str:
    """Which environment reads the settings file, for a sentence: one that uses another one's packages shares its
    file."""
    folder = os.path.dirname(os.path.dirname(os.path.realpath(choice)))
    place = folder
    while not os.path.isfile(os.path.join(place, "pyvenv.cfg")):
        if os.path.samefile(place, sys.base_prefix):
            return f"the Python installation {sys.base_prefix}"
        place, below = os.path.dirname(place), place
        if place == below:  # the packages of one user
            return f"the Python programs that use {folder}"
    return f"the environment {sys.prefix if os.path.samefile(place, sys.prefix) else place}"


def variable() -> str:
    """The name of the environment variable that enables activation for one process and its children."""
    startup = _start_up()
    return str(startup.VARIABLE)


def read_choice() -> str:
    """The environment's current setting; empty where it cannot be read."""
    startup = _start_up()
    try:
        with open(startup.CHOICE, encoding="ascii", errors="ignore") as file:
            return file.read(8)
    except OSError:
        return ""


def write_choice(word: str) -> str:
    """Write the setting; return an error message if that is not possible, else empty."""
    startup = _start_up()
    new = f"{startup.CHOICE}.{os.getpid()}"  # another `enable` may run at the same time
    try:
        # uv links a wheel's files to its cache: writing into this file would change every environment.
        with open(new, "w") as file:
            file.write(word)
        # The mode of the installed file: with this process's umask it might be readable by one user only.
        with contextlib.suppress(FileNotFoundError):
            os.chmod(new, stat.S_IMODE(os.stat(startup.CHOICE).st_mode))
        os.replace(new, startup.CHOICE)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        return f"cannot write {startup.CHOICE}: {error.strerror}"
    return ""


def refuse(sentence: str) -> int:
    """Print why something is not possible, and return the exit code for it."""
    print(f"diffusers-quantfix: {sentence}", file=sys.stderr)
    return 2
