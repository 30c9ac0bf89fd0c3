"""``status``: whether anything needs attention, then what does; the whole board on request."""

from __future__ import annotations

import json
import sys

from ..activation import status
from ..engine import board as states
from ..engine.board import STATES, summary
from ..text import wrapped
from .importing import importing
from .startup import describe
from .summary import nothing_installed
from .terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from ..engine.board import Answer, Board

# States that need attention; in every other state there is nothing to do.
_EXCEPTIONS = (states.FAILED, states.OVERWRITTEN, states.WAITING, states.CANDIDATE, states.UNCLAIMED)

EXIT_CODES = (
    "0 every needed fix is installed; 1 one failed, was overwritten, waits for a library that cannot be imported, or "
    "is a candidate above its claimed range; 2 wrong usage, invalid settings, or a library ended the process"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--brief", action="store_true", help="print only the summary")
    parser.add_argument(
        "--all", action="store_true", help="list every fix, not just those that need attention"
    )
    parser.add_argument(
        "--only",
        metavar="STATE[,STATE]",
        help=f"list only the fixes with these states: {', '.join(STATES)}",
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    """Print the board; return 1 if a fix that may be needed is not installed."""
    every = list(STATES if options.all or options.json else _EXCEPTIONS)
    wanted = [word.strip() for word in options.only.split(",")] if options.only else every
    for word in wanted:
        if word not in STATES:
            print(
                f"diffusers-quantfix: {word!r} is not a state; the states are {', '.join(STATES)}",
                file=sys.stderr,
            )
            return 2
    with importing():
        board = status()
    activation = describe()
    if options.json:
        print(json.dumps({**_data(board, wanted, options.brief), "activation": activation}, indent=2))
    else:
        show("\n".join(_lines(board, activation, wanted, options)))
    return 0 if board.ok else 1


def _data(board: Board, wanted: list[str], brief: bool) -> dict[str, object]:
    data = board.to_dict()
    data["summary"] = {state: [answer.id for answer in board if answer.state == state] for state in STATES}
    data["fixes"] = [answer.to_dict() for answer in board if answer.state in wanted and not brief]
    return data


def _verdict(board: Board) -> str:
    """Whether anything is left to do, in one sentence."""
    counts = {state: sum(answer.state == state for answer in board) for state in STATES}
    if not board.ok:
        bad = {state: counts[state] for state in (states.FAILED, states.OVERWRITTEN, states.WAITING)}
        bad["not patched in a new release"] = sum(answer.above for answer in board)
        return f"attention needed: {', '.join(f'{count} {what}' for what, count in bad.items() if count)}"
    if counts[states.DISABLED]:
        return f"{counts[states.DISABLED]} not patched, because you switched them off; all else is well"
    if counts[states.CANDIDATE]:
        return f"all known bugs are patched; {counts[states.CANDIDATE]} that should not be in these releases may be"
    if counts[states.APPLIED] or counts[states.UNCLAIMED]:
        return "all well: every known bug of these releases is patched"
    return "all well: these releases have no known bug"


def _by_reason(answers: list[Answer]) -> list[str]:
    """The answers, worst first, grouped by reason: a library that cannot be imported keeps all of its fixes waiting."""
    groups: dict[tuple[str, str], list[Answer]] = {}
    for state in _EXCEPTIONS:
        for answer in answers:
            if answer.state == state:
                groups.setdefault((state, answer.reason), []).append(answer)
    lines: list[str] = []
    for (state, reason), group in groups.items():
        if len(group) == 1:
            lines += group[0].lines()
        else:
            lines += wrapped(
                f"{state:<12} {len(group)} fixes: {_some([one.id for one in group])}", "", " " * 13
            )
            lines += wrapped(reason, " " * 13 + "-> ", " " * 16)
    return lines


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")


def _lines(board: Board, activation: str, wanted: list[str], options: argparse.Namespace) -> list[str]:
    brief = options.brief
    nothing = nothing_installed(board.installed, (name for answer in board for name in answer.claims))
    lines = wrapped(nothing) if nothing else [*([] if brief else wrapped(_verdict(board))), *summary(board)]
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
    if board.loaded and options.all:
        lines += wrapped(f"imported to answer: {', '.join(board.loaded)}", "", "    ")
    shown = [answer for answer in board if answer.state in wanted]
    whole = options.all or options.only
    listed = [line for one in shown for line in one.lines()] if whole else _by_reason(shown)
    lines += ["", *listed] if listed else []
    if not whole:
        lines += ["", *wrapped("every fix, and why: `python -m diffusers_quantfix status --all`", "", "    ")]
    return lines
