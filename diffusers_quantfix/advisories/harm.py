"""How bad a defect is, worst first: the order in which `check` lists what it found.

The symptom of a fix is the error text, or what a user sees; its words decide.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..engine.fix import Fix

WRONG = "wrong result"
ERROR = "error"
COST = "memory or time"
OTHER = "other"

# Worst first: what nobody notices, what stops a program, what makes it expensive, what is left.
MEANING = {
    WRONG: "wrong results or damaged weights, without an error",
    ERROR: "an exception or a crash",
    COST: "memory that is not freed, or a slow run",
    OTHER: "a setting or a message that is wrong",
}

_WORDS = {
    WRONG: r"\b(noise|nan|garbage|wrong|corrupts?|no( LoRA)? effect|loses the (bias|scales))\b",
    ERROR: r"Error\b|\b(error|cannot|could not|fails?|refuses?|not supported|unsupported|expected|missing|must|need"
    r"|no GPU found|does not contain|has no attribute|segmentation fault|crash|Couldn't)\b",
    COST: r"\b(out of memory|memory|slow|load time|stays? on the GPU)\b",
}


def harm(fix: Fix) -> str:
    """One of the keys of `MEANING`."""
    said = f"{fix.title}; {fix.symptom}"
    return next((kind for kind, words in _WORDS.items() if re.search(words, said, re.IGNORECASE)), OTHER)
