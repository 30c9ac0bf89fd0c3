"""The proof on this machine: each defect that applies here, without the package and with it.

Every case runs a real loading path on tiny models with real numerics, in two separate processes.  A case raises
upstream's own error, or says the figures, when the defect shows.
"""

from .report import Report
from .run import verify

__all__ = ["Report", "verify"]
