"""Why a fix cannot be installed: the two answers that are no fault."""

from __future__ import annotations


class TargetMissing(LookupError):
    """This release has no such class or function: there is nothing to patch, and nothing is wrong."""


class ForeignPatch(RuntimeError):
    """Another tool has replaced the target before us, and the patch would throw its work away.

    Args:
        what: which function was replaced by whose code, as a sentence.
        step: what the user can do, for the message.

    Attributes:
        what: as above.
    """

    def __init__(self, what: str, step: str) -> None:
        super().__init__(f"{what}; {step}")
        self.what = what
