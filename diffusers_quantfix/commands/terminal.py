"""How the commands print: 80 columns, colour only on a terminal that wants it, and libraries kept off our output."""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# A line that begins with one of these words shows it in this colour: green is well, yellow asks for a look, red for
# more.
_COLOURS = {
    "applied": 32,
    "patched": 32,
    "candidate": 33,
    "may be affected": 33,
    "cannot show": 33,
    "waiting": 33,
    "overwritten": 31,
    "failed": 31,
    "affected": 31,
    "NOT PATCHED": 31,
    "NOT SHOWN": 31,
}


def show(text: str) -> None:
    """Print an answer on standard output."""
    print(painted(text) if wants_colour() else text)


def painted(text: str) -> str:
    """The text with the verdicts at the beginnings of its lines in colour."""
    return "\n".join(_painted_line(line) for line in text.split("\n"))


def wants_colour() -> bool:
    """Only a terminal, and not against the user's word (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    if sys.platform == "win32" and not os.environ.get("WT_SESSION"):  # old consoles print the codes
        return False
    return bool(sys.stdout) and sys.stdout.isatty()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
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


def _painted_line(line: str) -> str:
    for word, colour in _COLOURS.items():
        if line == word or line.startswith(f"{word} "):
            return f"\033[{colour}m{word}\033[0m{line[len(word) :]}"
    return line
