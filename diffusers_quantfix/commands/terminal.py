"""How the commands print: as wide as the terminal, colour only if wanted, no output of the libraries."""

from __future__ import annotations

import contextlib
import os
import sys

from .. import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# A line that begins with one of these words shows it in this colour: green is good, yellow needs a look, red needs
# action.
_COLOURS = {
    "all well": 32,
    "applied": 32,
    "patched": 32,
    "candidate": 33,
    "may be affected": 33,
    "cannot reproduce": 33,
    "timed out": 33,
    "waiting": 33,
    "overwritten": 31,
    "failed": 31,
    "attention needed": 31,
    "affected": 31,
    "NOT PATCHED": 31,
    "NOT REPRODUCED": 31,
}


_NARROWEST, _WIDEST = 40, 120  # columns between which text is readable


def show(answer: str) -> None:
    """Print an answer on standard output."""
    print(painted(answer) if wants_colour() else answer)


def fit_terminal() -> None:
    """Make reports as wide as the terminal; 80 columns where standard output is not a terminal."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a file number
        columns = 0
    if columns:
        text.WIDTH = min(max(columns, _NARROWEST), _WIDEST)


def shows_progress() -> bool:
    """Whether standard error is a terminal on which a line can be redrawn."""
    return os.environ.get("TERM") != "dumb" and bool(sys.stderr) and sys.stderr.isatty()


def painted(answer: str) -> str:
    """The text, with verdicts at line starts in colour."""
    return "\n".join(_painted_line(line) for line in answer.split("\n"))


def wants_colour() -> bool:
    """Only on a terminal, unless the user wants it otherwise (https://no-color.org, https://force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") == "dumb":
        return False
    if sys.platform == "win32" and not os.environ.get("WT_SESSION"):  # old consoles print the codes
        return False
    return bool(sys.stdout) and sys.stdout.isatty()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Some releases print while being imported, even from native code and child processes; standard output is only for
    ours."""
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


def _painted_line(line: str) -> str:
    for word, colour in _COLOURS.items():
        if line == word or line.startswith((f"{word} ", f"{word}: ")):
            return f"\033[{colour}m{word}\033[0m{line[len(word) :]}"
    return line


def refuse(sentence: str, before: str = "") -> int:
    """Print why there is no answer, if standard error can be written, and return the exit code for it."""
    try:
        print(f"{before}diffusers-quantfix: {sentence}", file=sys.stderr, flush=True)
    except OSError:
        _drop(2)
    return 2


def unwritten(error: OSError) -> int:
    """Say that standard output could not be written, and return the exit code for it."""
    _drop(1)
    if isinstance(error, BrokenPipeError):  # `... | head`: the reader closed the pipe
        return 141  # as a shell reports a program that was ended by SIGPIPE
    return refuse(f"the output could not be written: {error.strerror or error}")


def _drop(stream: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # for the final flush at exit
