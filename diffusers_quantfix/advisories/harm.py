"""How bad a bug is: the values of ``Fix.harm``, worst first, as `check` lists its findings."""

from __future__ import annotations

# Goes unnoticed; stops the program; makes it expensive; anything else.
MEANING = {
    "wrong result": "wrong results or damaged weights, without an error",
    "error": "an exception, a crash or a hang",
    "memory or time": "memory that is not freed, or a slow run",
    "other": "a setting or a message that is wrong",
}
