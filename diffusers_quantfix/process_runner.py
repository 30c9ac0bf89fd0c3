"""The one runner of this process."""

from __future__ import annotations

import logging
import sys

from .engine.runner import Runner
from .fixes import DISTRIBUTIONS, TESTED
from .fixes.targets import PACKAGES, PROVED_CODE, TARGETS
from .surroundings import usual
from .user_settings import settings

# Not imported here: it depends on this module, and is always loaded first.
_VERSION = sys.modules[__package__].__version__
_FIXES = f"{__package__}.fixes"


def _show_debug() -> None:
    """``debug``: print every decision on standard error, regardless of the program's logging setup."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger = logging.getLogger(__package__)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


if settings().debug and "RUNNER" not in globals():
    _show_debug()

RUNNER = globals().get("RUNNER") or Runner(  # `importlib.reload` keeps the globals
    TARGETS,
    _FIXES,
    DISTRIBUTIONS,
    settings,
    _VERSION,
    usual,
    foundation="torch",
    tops=("diffusers", "optimum"),
    tested=TESTED,
    proofs=PROVED_CODE,
    packages=PACKAGES,
)
