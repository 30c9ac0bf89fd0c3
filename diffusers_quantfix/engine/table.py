"""The board as a table of at most 80 columns."""

from __future__ import annotations

import textwrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .board import Board

WIDTH = 80


def board_table(board: Board) -> str:
    """One line per fix with its state, and below it the reason."""
    lines = [f"diffusers_quantfix {board.quantfix}, Python {board.python}"]
    present = [
        f"{name} {version or '(unreadable version)'}"
        for name, version in board.installed.items()
        if version is not None
    ]
    lines += _paragraph("installed: " + (", ".join(present) or "none of the libraries that are mended"), "")
    problems = board.settings.get("problems")
    for problem in problems if isinstance(problems, list) else ():
        lines += _paragraph(f"warning: {problem}", "")
    if board.loaded:
        lines += _paragraph(f"imported to answer: {', '.join(board.loaded)}", "")
    lines.append("")
    for answer in board:
        lines.append(f"{answer.state:<13}{answer.id}")
        lines += _paragraph(answer.title, " " * 13)
        lines += _paragraph(answer.reason, " " * 13 + "-> ", " " * 16)
    counts: dict[str, int] = {}
    for answer in board:
        counts[answer.state] = counts.get(answer.state, 0) + 1
    lines += ["", ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))]
    return "\n".join(lines)


def _paragraph(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
