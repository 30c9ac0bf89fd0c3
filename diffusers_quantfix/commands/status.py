"""``status``: the board."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from ..activation import status
from .startup import describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the board; 1 when a fix that may be needed has no good answer."""
    with _stdout_to_stderr():
        board = status()
    activation = describe()
    if options.json:
        print(json.dumps({**board.to_dict(), "activation": activation}, indent=2))
    else:
        print(f"{board}\nactivation: {activation}")
    return 0 if board.ok else 1


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Some releases print when they are imported, from native code and child processes too; standard output is
    for our answer."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (OSError, AttributeError):  # closed, as in a service
        kept = -1
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept != -1:
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
            os.dup2(kept, 1)
            os.close(kept)
