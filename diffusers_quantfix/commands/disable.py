"""``disable``: takes `enable` back."""

from .startup import EXIT_CODES, add_arguments
from .startup import disable as run

__all__ = ["EXIT_CODES", "add_arguments", "run"]
