"""``enable``: activation at every start of this environment's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from ..fixes.targets import TARGETS
from .startup import MODULE, describe, environment, read_choice, refuse, variable, write_choice

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXIT_CODES = "0 done; 2 not possible here, with the reason"
SITECUSTOMIZE = "write `import diffusers_quantfix` into sitecustomize.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no options."""


def run(options: argparse.Namespace) -> int:
    """Enable activation for this environment, and check in a fresh interpreter that it works."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None:
        return refuse(
            f"{MODULE} is not installed in {environment()}: install diffusers-quantfix with pip or uv, or "
            f"{SITECUSTOMIZE}"
        )
    tool = _tool_of_its_own()
    libraries = {target.module.partition(".")[0] for target in TARGETS.values()} - {"torch"}
    if tool and not any(map(importlib.util.find_spec, sorted(libraries))):
        return refuse(
            f"{sys.prefix} is a private environment of {tool}, and none of the libraries is in it: install "
            "diffusers-quantfix into the environment of your program, and run `enable` with its Python"
        )
    earlier = read_choice()
    fault = write_choice("on")
    # If the setting cannot be written, the variable is an alternative, as long as the start-up file runs at all.
    variables = {variable(): "1"} if fault else {}
    active = _is_active_in_a_fresh_interpreter(variables)
    if not active and not fault:
        if read_choice() != "on":
            print(f"activation: {describe()} (another command has changed it meanwhile)")
            return 0
        active = _is_active_in_a_fresh_interpreter(variables)  # or changed it twice
    if not active:
        if not fault:
            write_choice(earlier)
        also = f"{fault}, and " if fault else ""
        folder = os.path.dirname(spec.origin or "")
        return refuse(
            f"{also}a fresh {sys.executable} does not run the start-up file of {folder}: this is "
            "normal for packages found through PYTHONPATH (`pip install --target`), in a zipapp and with `python -S`; "
            f"nothing was changed. Install diffusers-quantfix into {environment()} itself, or {SITECUSTOMIZE}"
        )
    if fault:
        return refuse(f"{fault}; set {variable()}=1 in the environment instead")
    print(f"activation: {describe()}")
    if tool:
        print(
            f"This is a private environment of {tool}: it does not activate programs of other environments."
        )
    return 0


def _tool_of_its_own() -> str:
    """The installer that created this environment for a single tool ("pipx", "uv tool"); else empty."""
    for file, name in (("pipx_metadata.json", "pipx"), ("uv-receipt.toml", "uv tool")):
        if os.path.isfile(os.path.join(sys.prefix, file)):
            return name
    return ""


def _is_active_in_a_fresh_interpreter(variables: dict[str, str]) -> bool:
    """Whether the start-up file runs there: importing a library then imports the package.

    Args:
        variables: environment variables to set there; all other settings of this package are removed.
    """
    program = (
        "import sys, importlib.util; importlib.util.find_spec('diffusers'); "
        "sys.exit(0 if 'diffusers_quantfix' in sys.modules else 3)"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DIFFUSERS_QUANTFIX")
    } | variables
    try:
        # "-I" would ignore PYTHONPATH, whose folders' start-up files are not read either.
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=60, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
