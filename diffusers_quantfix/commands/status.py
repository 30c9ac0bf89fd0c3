"""``status``: the board."""

from __future__ import annotations

import json

from ..activation import status
from .startup import describe
from .terminal import show, stdout_to_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXIT_CODES = (
    "0 every fix that is needed is in; 1 one failed, was overwritten, or waits for a library that cannot be imported; "
    "2 wrong usage, or settings that cannot be understood"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the board; 1 when a fix that may be needed has no good answer."""
    with stdout_to_stderr():
        board = status()
    activation = describe()
    if options.json:
        print(json.dumps({**board.to_dict(), "activation": activation}, indent=2))
    else:
        show(f"{board}\nactivation: {activation}")
    return 0 if board.ok else 1
