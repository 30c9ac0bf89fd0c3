"""Waits for the first of the libraries, for a package that is imported before them.

The finder is in the package's `__init__`, which loads this module where there may already be a setting or a library,
and otherwise when the first library is imported, before that library is found. Most processes that import the package
at their start, or through a start-up file, never import a library, and pay for one small module only.
`diffusers_quantfix.activation` is loaded with the first library.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def found(finder: "Any", name: str, path: "Any", target: "Any") -> "Any":
    """Activate the package while the first library is searched for; returns the watcher's spec for a module of torch.

    Args:
        finder: the waiting finder; its ``wake`` activates the package, and its ``woken`` says whether that has been
            done.
        name: the library, or the patched module of torch, as a finder is given it.
        path: the same.
        target: the same.
    """
    if finder.woken:
        return None
    try:
        finder.wake()
    except Exception:
        # The error of a signal handler, as a KeyboardInterrupt: the program may import the library again.
        import os

        finder.woken = "strict" in os.environ.get("DIFFUSERS_QUANTFIX", "")
        raise
    finder.woken = True  # not earlier: an import in another thread must wait too
    # None of the libraries is patched itself, only modules in it. A program that imports a patched module of torch
    # directly must get the patched version.
    return watched_spec(name, path, target) if name.startswith("torch.") else None


def watched_spec(name: str, path: "Any", target: "Any") -> "Any":
    """The watcher's spec, for an import search that has already passed the watcher; None without a watcher."""
    import sys

    for finder in sys.meta_path:
        if _module_of(finder) == f"{__package__}.engine.watcher":
            return finder.find_spec(name, path, target)
    return None


def _module_of(finder: "Any") -> str:
    """The module of a finder's class: a class of other code may have none, or raise on access."""
    try:
        return str(type(finder).__module__)
    except Exception:
        return ""


def wait(finder: "Any", waited_for: "set[str]") -> None:
    """Let ``finder`` wait for the first of the modules and then wake the package; wake it now where that cannot wait.

    It cannot wait if there are settings, in which a typo must be reported, if a library is already imported, or if
    there is an earlier copy of the package to replace: one that a program deleted from ``sys.modules``, or one that is
    vendored under another name.
    """
    import os
    import sys

    forget()
    forget_other_names()
    earlier = any(_module_of(other).endswith(".engine.watcher") for other in sys.meta_path)
    imported = not waited_for.isdisjoint(sys.modules)
    if os.environ.get("DIFFUSERS_QUANTFIX") or earlier or imported:
        finder.wake()
    else:
        sys.meta_path.insert(0, finder)


def waiting() -> bool:
    """Whether the package has not been activated yet."""
    import sys

    return any(_waits(finder) and not getattr(finder, "woken", True) for finder in sys.meta_path)


def give_way(finder: object) -> bool:
    """Replace the waiting finder with another one; False when there is none.

    At the same position: the running search counts the finders, and other code that inserted one before it may do so
    too.
    """
    import sys

    for position, here in enumerate(sys.meta_path):
        if _waits(here):
            sys.meta_path[position] = finder  # type: ignore[call-overload]  # every caller passes a finder
            return True
    return False


def forget() -> None:
    """Remove the waiting finder, and those of earlier copies of the package."""
    import sys

    sys.meta_path[:] = [finder for finder in sys.meta_path if not _waits(finder)]


def forget_other_names() -> None:
    """Remove the waiting finders of copies of the package that are vendored under another name."""
    import sys

    sys.meta_path[:] = [finder for finder in sys.meta_path if _waits(finder) or not _is_ours(finder)]


def _waits(finder: "Any") -> bool:
    return _is_ours(finder) and finder.__module__ == __package__


def _is_ours(finder: "Any") -> bool:
    """Whether it is the waiting finder of a copy of the package, under any name."""
    return type(finder) is type(_is_ours) and finder.__name__ == "_first_library" and hasattr(finder, "woken")


def warn(sentence: str) -> None:
    """Log a warning.  Never raises: it is called inside imports of other libraries and at interpreter shutdown."""
    try:
        import logging

        logging.getLogger(__package__).warning("%s", sentence)
    except Exception:
        pass
