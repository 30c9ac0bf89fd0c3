"""The distributions that have advisories."""

from __future__ import annotations

from packaging.utils import canonicalize_name

from ..fixes import DISTRIBUTIONS

SELF = "diffusers-quantfix"

# The only parts of the inputs that are kept in full and may be quoted.
KNOWN = frozenset({SELF, *map(canonicalize_name, DISTRIBUTIONS)})
