"""The one runner of this process."""

from __future__ import annotations

import logging

from . import __version__
from .activation import settings
from .engine.runner import Runner
from .fixes import DISTRIBUTIONS, INDEX

_FIXES = __name__.partition(".")[0] + ".fixes."


def _show_debug() -> None:
    """``debug``: every decision on standard error, whatever the program does with logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger = logging.getLogger(__name__.partition(".")[0])
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


if settings().debug:
    _show_debug()

RUNNER = Runner(
    {fix_id: (_FIXES + file, target) for fix_id, (file, target) in INDEX.items()},
    DISTRIBUTIONS,
    settings,
    __version__,
)
