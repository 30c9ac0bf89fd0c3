"""``enable`` and ``disable``: activation at every start of this environment's interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

MODULE = "diffusers_quantfix_startup"
EXIT_CODES = "0 done; 2 not possible here, with the reason"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Neither command has options."""


def enable(options: argparse.Namespace) -> int:
    """Choose activation for this environment."""
    return _choose("on")


def disable(options: argparse.Namespace) -> int:
    """Take the choice back."""
    return _choose("")


def describe() -> str:
    """Whether the package is activated at the start of this environment's interpreter, and by what, as a sentence."""
    if importlib.util.find_spec(MODULE) is None:
        return "no start-up file: the package is not installed in this environment"
    import diffusers_quantfix_startup as startup

    word = os.environ.get(startup.VARIABLE, "")
    by = startup.chosen()
    if by == "variable":
        return f"at every start, by {startup.VARIABLE}=1"
    if by == "enable":
        return "at every start, by `python -m diffusers_quantfix enable`"
    if word:
        return f"off, by {startup.VARIABLE}={word}"
    return "only where it is imported; `python -m diffusers_quantfix enable` activates it at every start"


def _choose(word: str) -> int:
    spec = importlib.util.find_spec(MODULE)
    if spec is None:
        return _refuse(
            f"{MODULE} is not installed in the environment of {sys.executable}: install diffusers-quantfix with pip or "
            f"uv, or write `import diffusers_quantfix` into sitecustomize.py"
        )
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
        return _refuse(
            f"cannot write {startup.CHOICE}: {error.strerror}; set {startup.VARIABLE}={'1' if word else '0'} "
            "in the environment instead"
        )
    print(f"activation: {describe()}")
    return 0


def _refuse(sentence: str) -> int:
    print(f"diffusers-quantfix: {sentence}", file=sys.stderr)
    return 2
