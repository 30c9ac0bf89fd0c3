"""How bad a bug is: the values of ``Fix.harm``, worst first, which is the order in which `check` lists what it
found."""

from __future__ import annotations

# What nobody notices, what stops a program, what makes it expensive, what is left.
MEANING = {
    "wrong result": "wrong results or damaged weights, without an error",
    "error": "an exception, a crash or a hang",
    "memory or time": "memory that is not freed, or a slow run",
    "other": "a setting or a message that is wrong",
}
