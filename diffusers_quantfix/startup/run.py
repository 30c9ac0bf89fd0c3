"""Runs at every start of the interpreter of an environment where diffusers_quantfix is installed.

The wheel puts it next to the package, as the package ``diffusers_quantfix_startup``, not into it: importing
diffusers_quantfix activates it, and a dependency in a requirements file may not change a program by surprise.  It is
a folder because uv leaves the bytecode of a removed module behind.  ``diffusers_quantfix_startup.pth`` (Python <= 3.14)
or ``diffusers_quantfix_startup.start`` (PEP 829) calls `run`, which does nothing until activation was chosen: by
``DIFFUSERS_QUANTFIX_AUTO=1``, or once per environment by ``python -m diffusers_quantfix enable``.

`site` is still at work when this runs, perhaps twice in a virtual environment: no import but of builtins before the
choice is known, and whatever goes wrong, the interpreter starts.
"""

import os

VARIABLE = "DIFFUSERS_QUANTFIX_AUTO"
# Installed with the wheel, so that its removal removes the choice with it.
CHOICE = os.path.join(os.path.dirname(__file__), "choice")


def chosen() -> str:
    """By what activation was chosen: "variable", "enable", or "" when it was not."""
    word = os.environ.get(VARIABLE, "")
    if word:
        return "variable" if word == "1" else ""
    try:
        with open(CHOICE) as file:
            return "enable" if file.read().strip() == "on" else ""
    except OSError:
        return ""


def run() -> None:
    """Activate the package if that was chosen."""
    if chosen():
        try:
            import diffusers_quantfix  # noqa: F401
        except ImportError:
            pass  # the package was removed by hand and this file was left: say nothing, at every start
