"""How reports format text: their width, and functions for paragraphs, byte counts and exit codes."""

from __future__ import annotations

import textwrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTH = 80  # the commands set it to the terminal's width


def wrapped(text: str, first: str = "", rest: str | None = None, break_words: bool = False) -> list[str]:
    """The lines of a paragraph; links, dotted names and option names are not broken.

    Args:
        text: the paragraph.
        first: what the first line begins with.
        rest: what the other lines begin with; the same as ``first`` by default.
        break_words: whether a word that is wider than a line is broken instead.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=break_words,
        break_on_hyphens=False,
    )


def process_end(code: int) -> str:
    """How a process ended, as a sentence, with the name of a signal instead of its number."""
    if code < 0:
        import signal

        try:
            return f"the process was killed by {signal.Signals(-code).name}"
        except ValueError:
            pass
    return f"the process ended with exit code {code}"


def human(count: int) -> str:
    """A human-readable byte count: ``1.2 GB`` (powers of 1000, as GPU vendors count)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def sums(bytes_by_device: Mapping[str, int]) -> str:
    """The bytes on each device, for a sentence: ``1.2 GB on cuda:0, 3.0 kB on cpu``; "no memory" if there are none."""
    return (
        ", ".join(f"{human(count)} on {device}" for device, count in bytes_by_device.items()) or "no memory"
    )
