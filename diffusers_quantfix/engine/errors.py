"""Why a fix cannot be installed: the two answers that are no fault."""

from __future__ import annotations


class TargetMissing(LookupError):
    """This release has no such class or function: there is nothing to patch, and nothing is wrong."""


class ForeignPatch(RuntimeError):
    """Another tool has replaced the target before us, and the patch would throw its work away."""
