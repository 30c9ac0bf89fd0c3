"""What interpreter start-up needs where activation may be enabled; the wheel puts it next to `run`.

Errors here never keep the interpreter from starting, and print no traceback at every start.
"""

from . import NAMES  # type: ignore[attr-defined]  # in the wheel `run` is the package itself

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "DIFFUSERS_QUANTFIX_AUTO"
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")
# Installed with the wheel, so that uninstalling removes this file too.
CHOICE = __file__.rpartition("enabled")[0] + "choice"

_reported = False
_woken = False


def chosen() -> str:
    """How activation was enabled: "variable", "enable", or "" when it was not."""
    import os

    word = os.environ.get(VARIABLE, "").strip().lower()
    if word:
        return "variable" if word in ON else ""
    try:
        with open(CHOICE, "rb") as file:
            return "enable" if file.read(8).strip() == b"on" else ""
    except OSError:
        return ""


def misunderstood() -> str:
    """A sentence that quotes the variable's value if it is neither on nor off; else empty."""
    import os

    word = os.environ.get(VARIABLE, "").strip()
    if not word or word.lower() in ON or word.lower() in OFF:
        return ""
    return f"{VARIABLE}={word} is neither {', '.join(ON)} nor {', '.join(OFF)}: diffusers_quantfix is not activated"


def start() -> None:
    """Import the package now if activation is enabled: it reads its settings, and waits for the first library."""
    if not chosen():
        _report_misunderstood()
        return
    try:
        import diffusers_quantfix  # noqa: F401
    except Exception as error:
        _report_damaged(error)


def _report_damaged(error: Exception) -> None:
    """Report on standard error that the package cannot be imported, unless it was deleted by hand.

    Raises:
        Exception: under ``strict``, what the package raises on purpose.
    """
    import os
    import sys

    if isinstance(error, ImportError):
        return
    if "strict" in os.environ.get("DIFFUSERS_QUANTFIX", ""):
        raise error
    if sys.stderr is not None:
        said = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"diffusers_quantfix: cannot be imported, no fixes applied: {said}\n")


def _report_misunderstood() -> None:
    """Report once, on standard error, that the variable's value is not valid."""
    global _reported
    sentence = misunderstood()
    if sentence and not _reported:
        import sys

        _reported = True
        if sys.stderr is not None:
            sys.stderr.write(f"diffusers_quantfix: {sentence}\n")


def _imported_elsewhere() -> bool:
    """Whether another thread is importing the package; that import activates it.

    That thread may wait for the lock under which finders are asked, and must not be waited for here.
    """
    import sys
    from _thread import get_ident

    locks = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    reference = locks.get("diffusers_quantfix")
    lock = reference and reference()
    return lock is not None and getattr(lock, "owner", None) != get_ident()


def found(name: str, path: "Any", target: "Any") -> "Any":
    """Import and activate the package if ``name`` is the first library; returns the watcher's spec for a module of
    torch.

    The calling finder is not removed: the running search iterates over the finders by position, and would skip one.

    Args:
        name: the library, the patched module of torch, or a parent of it, as a finder is given it.
        path: the same.
        target: the same.
    """
    global _woken
    if _woken or name not in NAMES.split() or not chosen() or _imported_elsewhere():
        return None
    _woken = True
    try:
        try:
            from diffusers_quantfix import wake
        except Exception as error:
            _report_damaged(error)
            return None
        wake()  # the package's own finder would come too late for the running search
    except KeyboardInterrupt:
        _woken = False  # the program may import the library again
        raise
    if name.partition(".")[0] != "torch":
        return None
    try:
        from diffusers_quantfix.first_library import (
            watched_spec,
        )  # this search has already passed the watcher
    except Exception:  # `wake` has reported it
        return None
    return watched_spec(name, path, target)
