"""``enable``: activation at every start of this environment's interpreter."""

from .startup import EXIT_CODES, add_arguments
from .startup import enable as run

__all__ = ["EXIT_CODES", "add_arguments", "run"]
