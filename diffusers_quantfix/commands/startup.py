"""``enable`` and ``disable``: activation at every start of this environment's interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys

from ..first_library import LIBRARIES

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

MODULE = "diffusers_quantfix_startup"
SITECUSTOMIZE = "write `import diffusers_quantfix` into sitecustomize.py"
EXIT_CODES = "0 done; 2 not possible here, with the reason"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Neither command has options."""


def enable(options: argparse.Namespace) -> int:
    """Choose activation for this environment, and see in a fresh interpreter that it really happens."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None:
        return _refuse(
            f"{MODULE} is not installed in {_environment()}: install diffusers-quantfix with pip or uv, or "
            f"{SITECUSTOMIZE}"
        )
    tool = _tool_of_its_own()
    if tool and not any(importlib.util.find_spec(library) for library in LIBRARIES):
        return _refuse(
            f"{sys.prefix} is a private environment of {tool}, and none of the libraries is in it: install "
            "diffusers-quantfix into the environment of your program, and run `enable` with its Python"
        )
    earlier = _read()
    fault = _write("on")
    if fault:
        return _refuse(f"{fault}; set {_variable()}=1 in the environment instead")
    if not _is_active_in_a_fresh_interpreter():
        _write(earlier)
        return _refuse(
            f"a fresh {sys.executable} does not run the start-up file of {os.path.dirname(spec.origin or '')}: that is "
            "so for packages found through PYTHONPATH (`pip install --target`), in a zipapp and with `python -S`; "
            f"nothing was changed. Install diffusers-quantfix into {_environment()} itself, or {SITECUSTOMIZE}"
        )
    print(f"activation: {describe()}")
    if tool:
        print(
            f"This is a private environment of {tool}: programs of other environments are not activated by it."
        )
    return 0


def disable(options: argparse.Namespace) -> int:
    """Take the choice back."""
    if importlib.util.find_spec(MODULE) is None:
        return _refuse(f"{MODULE} is not installed in {_environment()}: there is nothing to take back")
    fault = _write("")
    if fault:
        return _refuse(f"{fault}; set {_variable()}=0 in the environment instead")
    print(f"activation: {describe()}")
    return 0


def describe() -> str:
    """Whether the package is activated at the start of this environment's interpreter, and by what, as a sentence."""
    if importlib.util.find_spec(MODULE) is None:
        return f"no start-up file: the package is not installed in {_environment()}"
    import diffusers_quantfix_startup as startup

    by = startup.chosen()
    if by == "variable":
        return f"at every start, by {startup.VARIABLE}={os.environ[startup.VARIABLE]}"
    if by == "enable":
        return f"at every start of {_environment()}, by `python -m diffusers_quantfix enable`"
    # An editable install keeps the start-up module of the day on which it was installed.
    misunderstood = getattr(startup, "misunderstood", str)()
    if misunderstood:
        return f"off: {misunderstood}"
    if os.environ.get(startup.VARIABLE):
        return f"off, by {startup.VARIABLE}={os.environ[startup.VARIABLE]}"
    return "only where it is imported; `python -m diffusers_quantfix enable` activates it at every start"


def _environment() -> str:
    kind = "the environment" if sys.prefix != sys.base_prefix else "the Python installation"
    return f"{kind} {sys.prefix}"


def _tool_of_its_own() -> str:
    """The installer that made this environment for one tool alone ("pipx", "uv tool"); empty otherwise."""
    for file, name in (("pipx_metadata.json", "pipx"), ("uv-receipt.toml", "uv tool")):
        if os.path.isfile(os.path.join(sys.prefix, file)):
            return name
    return ""


def _is_active_in_a_fresh_interpreter() -> bool:
    """Whether the start-up file runs there: asking for a library then imports the package."""
    program = (
        "import sys, importlib.util; importlib.util.find_spec('diffusers'); "
        "sys.exit(0 if 'diffusers_quantfix' in sys.modules else 3)"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DIFFUSERS_QUANTFIX")
    }
    try:
        # "-I" would leave out what PYTHONPATH gives, where the start-up file is not read either.
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _variable() -> str:
    import diffusers_quantfix_startup as startup

    return str(startup.VARIABLE)


def _read() -> str:
    import diffusers_quantfix_startup as startup

    try:
        with open(startup.CHOICE) as file:
            return file.read()
    except OSError:
        return ""


def _write(word: str) -> str:
    """Write the choice; why that is not possible, as a sentence, else empty."""
    import diffusers_quantfix_startup as startup

    new = startup.CHOICE + ".new"
    try:
        # uv links the files of a wheel to its cache: writing into this one would choose for every environment.
        with open(new, "w") as file:
            file.write(word)
        os.replace(new, startup.CHOICE)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        return f"cannot write {startup.CHOICE}: {error.strerror}"
    return ""


def _refuse(sentence: str) -> int:
    print(f"diffusers-quantfix: {sentence}", file=sys.stderr)
    return 2
