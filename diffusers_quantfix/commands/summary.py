"""What a person must know first of a board, shared by `status` and `doctor`."""

from __future__ import annotations

import sys

from ..engine import board as states

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..engine.board import Board

# States that ask for a look; each is named by id where it occurs.
_BY_NAME = (states.FAILED, states.OVERWRITTEN, states.WAITING, states.CANDIDATE)


def nothing_installed(board: Board) -> str:
    """That none of the patched libraries is installed, as a sentence; empty where one is."""
    names = list(dict.fromkeys(name for answer in board for name in answer.claims))
    if any(board.installed.get(name) is not None for name in names):
        return ""
    libraries = [name for name in board.installed if name in names] or names
    return (
        f"none of the libraries that are patched ({', '.join(libraries)}) is installed for this interpreter: "
        f"{sys.executable} (Python {board.python}); run this command with the interpreter that has them"
    )


def candidates(board: Board) -> str:
    """That fixes were left out because their release is unclaimed, with the next step; empty where there is none."""
    ids = [answer.id for answer in board if answer.state == states.CANDIDATE]
    if not ids:
        return ""
    count = "1 fix is a candidate" if len(ids) == 1 else f"{len(ids)} fixes are candidates"
    return (
        f"{count} for an unclaimed release: the defect seems to be there, and nothing was changed. Install a release "
        "of diffusers-quantfix that claims it, or report what `python -m diffusers_quantfix status` says of them: "
        f"{', '.join(ids)}"
    )


def counts(board: Board) -> list[str]:
    """How many fixes have which state, the applied ones first; those that ask for a look by name."""
    ids: dict[str, list[str]] = {}
    for answer in board:
        ids.setdefault(answer.state, []).append(answer.id)
    order = [states.APPLIED, *(state for state in _BY_NAME if state != states.APPLIED)]
    quiet = [state for state in states.STATES if state not in order and state in ids]
    first = [
        f"{len(ids.get(states.APPLIED, ()))} applied",
        *(f"{len(ids[state])} {state}" for state in quiet),
    ]
    lines = [", ".join(first)]
    lines += [f"{len(ids[state])} {state}: {', '.join(ids[state])}" for state in _BY_NAME if state in ids]
    return lines
