"""What is logged. A handler or a filter of the program that raises costs the line, and nothing else."""

from __future__ import annotations

import logging

from .interruptions import heed_interruption

_LOGGER = logging.getLogger(__name__.partition(".")[0])


def log(level: int, sentence: str, *args: object) -> None:
    """Log a sentence, with the caller as its place, as the logger's own methods do."""
    try:
        _LOGGER.log(level, sentence, *args, stacklevel=2)
    except Exception as error:
        heed_interruption(error)
