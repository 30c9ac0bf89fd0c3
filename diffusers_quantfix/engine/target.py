"""Whether a target module is available, and if not, why."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from .board import MISSING, WAITING
from .interruptions import heed_interruption
from .versions import installed_version


def finished(target: str) -> ModuleType | None:
    """The target, if it is completely imported."""
    module = sys.modules.get(target)
    if module is None or is_lazy(module) or is_stand_in(module):
        return None
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


def is_lazy(module: object) -> bool:
    """Whether a module of ``importlib.util.LazyLoader`` has not been executed yet; any attribute access executes it."""
    return type(module) is getattr(importlib.util, "_LazyModule", None)


def is_stand_in(module: object) -> bool:
    """Whether it is no module: a mock, or what a program without the library puts there to raise on any use."""
    if is_lazy(module):
        return False
    try:
        spec = getattr(module, "__spec__", None)  # which a module's own class may refuse too
        return spec is None and not isinstance(module, ModuleType)
    except Exception as error:
        heed_interruption(error)
        return True


def is_missing(library: str) -> bool:
    if library in sys.modules:
        return False
    try:
        return importlib.util.find_spec(library) is None
    except Exception as error:  # another tool's finder failed: the import itself will raise the error
        heed_interruption(error)
        return False


def import_target(target: str) -> tuple[str, str]:
    """Import a target; on an error return the (state, reason) for its fixes, else two empty strings."""
    library = target.partition(".")[0]
    try:
        importlib.import_module(target)
        return "", ""
    except ModuleNotFoundError as error:
        # The release has no such module; a missing dependency of the library is something else.
        if error.name and (target + ".").startswith(error.name + ".") and error.name != library:
            version = installed_version(library) or ""
            return MISSING, f"{library} {version} has no module {error.name}".replace("  ", " ")
        return WAITING, f"{library} is installed but cannot be imported: {say(error)}"
    except BaseException as error:  # some releases raise SystemExit or worse; status must still work
        if isinstance(error, KeyboardInterrupt):
            raise
        heed_interruption(error)
        return WAITING, f"{library} is installed but cannot be imported: {say(error)}"


def say(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
