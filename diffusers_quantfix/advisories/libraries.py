"""The distributions on which the advisories have something to say."""

from __future__ import annotations

from packaging.utils import canonicalize_name

from ..fixes import DISTRIBUTIONS

SELF = "diffusers-quantfix"

# What is remembered of the inputs in full, and all that may be quoted of them.
KNOWN = frozenset({SELF, *map(canonicalize_name, DISTRIBUTIONS)})
