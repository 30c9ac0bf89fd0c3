"""``disable``: no more activation at the start of this environment's interpreter."""

from __future__ import annotations

import importlib.util

from .startup import MODULE, describe, environment, refuse, variable, write_choice

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXIT_CODES = "0 done; 2 not possible here, with the reason"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no options."""


def run(options: argparse.Namespace) -> int:
    """Remove the setting that `enable` wrote."""
    if importlib.util.find_spec(MODULE) is None:
        return refuse(f"{MODULE} is not installed in {environment()}: there is nothing to disable")
    fault = write_choice("")
    if fault:
        return refuse(f"{fault}; set {variable()}=0 in the environment instead")
    print(f"activation: {describe()}")
    return 0
