"""Why a fix cannot be installed, or not yet: reasons that are not errors."""

from __future__ import annotations


class TargetMissing(LookupError):
    """This release has no such class or function: there is nothing to patch. Not an error."""


class Undecided(LookupError):
    """A probe cannot be answered before another module is imported; the fix is asked again then.

    Args:
        needs: the full name of that module.

    Attributes:
        needs: as above.
    """

    def __init__(self, needs: str) -> None:
        super().__init__(needs)
        self.needs = needs


class ForeignPatch(RuntimeError):
    """Another tool replaced the target earlier, and our patch would remove its code.

    Args:
        what: which function was replaced, and by whose code, as a sentence.
        step: what the user can do, for the message.

    Attributes:
        what: as above.
    """

    def __init__(self, what: str, step: str) -> None:
        super().__init__(f"{what}; {step}")
        self.what = what


class Overtaken(RuntimeError):
    """Another thread has written a slot since a fix looked at it; the fix looks again."""
