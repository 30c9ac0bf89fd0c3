"""In a forked child, forgets what another thread was importing for us when the process forked.

That thread does not exist in the child, so an import of such a module would wait for its import lock without end.  For
us are our own modules, and what they and our probes import; what the thread was importing by itself is as without the
package.
"""

import os
import sys
from _thread import get_ident

_PACKAGE = f"{__package__}."


def _forget_unfinished() -> None:
    locks = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    reporting = getattr(sys.modules.get(f"{_PACKAGE}engine.watcher"), "reporting", {})
    ours = set()  # threads that were importing for us
    for name, lock in [(name, reference()) for name, reference in locks.items()]:
        # The locks of a thread are in the order of its imports: what is imported for a module comes after it.
        owner = getattr(lock, "owner", None)
        if owner is None or owner == get_ident():
            continue
        if f"{name}.".startswith(_PACKAGE):
            ours.add(owner)
        if owner in ours:
            del locks[name]
            for module in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
                del sys.modules[module]
        if reporting.get(owner) == name:  # all that it imports now is for our fixes
            ours.add(owner)
    reporting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_unfinished)
