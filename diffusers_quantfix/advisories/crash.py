"""An error that ended a program: does it belong to a known bug that is not patched here?"""

from __future__ import annotations

from ..engine import board as states
from ..fixes.targets import declarations
from .symptoms import search

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..engine.board import Answer

_PACKAGE = __name__.partition(".")[0]
_COMMAND = f"python -m {_PACKAGE}"
_LONGEST = 20_000  # characters: the program ends after the search, which takes seconds for a longer text
_NEAR = 1.0  # scores that differ by less do not decide

# What to do, by the state of a fix whose bug has ended the program.
_ADVICE = {
    states.DISABLED: "to patch it, remove that setting",
    states.CANDIDATE: "a release of diffusers-quantfix that claims yours patches it",
    states.OUT_OF_RANGE: f"`{_COMMAND} explain {{id}}` names the affected releases",
    states.FAILED: f"`{_COMMAND} status --only failed` says more",
    states.OVERWRITTEN: "remove the other patch, or import it before this package",
}


def hint(error: BaseException) -> str:
    """One sentence about the known, unpatched bug that an error belongs to; empty if there is none.  Never raises."""
    try:
        return _hint(error)
    except Exception:  # never add a second error to the program's own
        return ""


def _hint(error: BaseException) -> str:
    import traceback

    from ..activation import status

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}\n{text[-_LONGEST // 2 :]}"
    found = [match for match in search(text, declarations()) if match.by_message]
    if not found:
        return ""
    board = status(load=False)
    for match in found:
        answer = board[match.fix.id]
        if match.score < found[0].score - _NEAR:
            break
        # "Disabled" says nothing about the release, and outside the claimed range a message alone proves little.
        if answer.state == states.DISABLED and match.inside is False:
            continue
        if answer.state == states.OUT_OF_RANGE and not match.frames:
            continue
        if answer.state in _ADVICE:
            return _sentence(answer)
    return ""


def _sentence(answer: Answer) -> str:
    advice = _ADVICE[answer.state].format(id=answer.id)
    if answer.above:
        advice = f"DIFFUSERS_QUANTFIX=newer:{answer.id} patches it anyway"
    about = "" if "explain" in advice else f" (`{_COMMAND} explain {answer.id}`)"
    return f"this looks like {answer.id}, which is not patched here: {answer.reason}; {advice}{about}"
