"""What users need to know first, shared by `status`, `doctor` and `verify`."""

from __future__ import annotations

import sys

from ..fixes import DISTRIBUTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def patched_libraries(claimed: Iterable[str]) -> set[str]:
    """Those of the claimed distributions that are patched: torch may only decide about bugs of others."""
    return set(claimed) - {"torch"}


def nothing_installed(installed: Mapping[str, str | None], claimed: Iterable[str]) -> str:
    """A sentence that none of the patched libraries is installed; empty if one is.

    Args:
        installed: distribution -> its version, None where it is not installed.
        claimed: the distributions that fixes claim.
    """
    claimed = patched_libraries(claimed)
    if any(installed.get(name) is not None for name in claimed):
        return ""
    libraries = [name for name in DISTRIBUTIONS if name in claimed] or sorted(claimed)
    return (
        f"none of the libraries that are patched ({', '.join(libraries)}) is installed for this interpreter, "
        f"{sys.executable}; run this command with the interpreter that has them"
    )
