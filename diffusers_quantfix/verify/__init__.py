"""The proof on this machine: each bug that applies here, without the package and with it.

Every case runs real code paths on tiny models with real numerics, in two separate processes. If the bug shows, the case
raises upstream's own error, or an AssertionError with the figures.
"""

from .report import Report
from .run import verify

__all__ = ["Report", "verify"]
