"""``status``: the board, its summary first."""

from __future__ import annotations

import json
import sys

from ..activation import status
from ..engine.board import STATES, summary
from ..text import wrapped
from .importing import importing
from .startup import describe
from .summary import nothing_installed
from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ..engine.board import Board

EXIT_CODES = (
    "0 every needed fix is installed; 1 one failed, was overwritten, waits for a library that cannot be imported, or "
    "is a candidate above its claimed range; 2 wrong usage, settings that cannot be understood, or a library that ends "
    "the process"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--brief", action="store_true", help="print only the summary")
    parser.add_argument(
        "--only",
        metavar="STATE[,STATE]",
        help=f"list only the fixes with these states: {', '.join(STATES)}",
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the board; return 1 when a fix that may be needed is not installed."""
    wanted = [word.strip() for word in options.only.split(",")] if options.only else list(STATES)
    for word in wanted:
        if word not in STATES:
            print(
                f"diffusers-quantfix: {word!r} is no state; the states are {', '.join(STATES)}",
                file=sys.stderr,
            )
            return 2
    with importing():
        board = status()
    activation = describe()
    if options.json:
        print(json.dumps({**_data(board, wanted, options.brief), "activation": activation}, indent=2))
    else:
        show("\n".join(_lines(board, activation, wanted, options.brief)))
    return 0 if board.ok else 1


def _data(board: Board, wanted: list[str], brief: bool) -> dict[str, object]:
    data = board.to_dict()
    data["summary"] = {state: [answer.id for answer in board if answer.state == state] for state in STATES}
    data["fixes"] = [answer.to_dict() for answer in board if answer.state in wanted and not brief]
    return data


def _lines(board: Board, activation: str, wanted: list[str], brief: bool) -> list[str]:
    nothing = nothing_installed(board.installed, (name for answer in board for name in answer.claims))
    lines = wrapped(nothing) if nothing else summary(board)
    lines += wrapped(f"activation: {activation}", "", "    ")
    problems = board.settings.get("problems")
    for problem in problems if isinstance(problems, list) else ():
        lines += wrapped(f"warning: {problem}", "", "    ")
    if brief or nothing:
        return lines
    present = [
        f"{name} {version or '(unreadable version)'}"
        for name, version in board.installed.items()
        if version is not None
    ]
    lines += ["", f"diffusers_quantfix {board.quantfix}, Python {board.python}"]
    lines += wrapped(
        "installed: " + (", ".join(present) or "none of the libraries that are patched"), "", "    "
    )
    if board.loaded:
        lines += wrapped(f"imported to answer: {', '.join(board.loaded)}", "", "    ")
    lines.append("")
    for answer in board:
        if answer.state in wanted:
            lines += answer.lines()
    return lines
