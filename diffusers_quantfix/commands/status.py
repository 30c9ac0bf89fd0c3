"""``status``: the board."""

from __future__ import annotations

import contextlib
import json
import sys

from ..activation import status
from .startup import describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the board; 1 when a fix that may be needed has no good answer."""
    # Some releases print when they are imported; standard output is for our answer.
    with contextlib.redirect_stdout(sys.stderr):
        board = status()
    activation = describe()
    if options.json:
        print(json.dumps({**board.to_dict(), "activation": activation}, indent=2))
    else:
        print(f"{board}\nactivation: {activation}")
    return 0 if board.ok else 1
