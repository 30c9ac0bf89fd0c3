"""Waits for the first of the libraries, for a package that is imported before them.

The finder is in the package's `__init__`, which loads this module where there may already be a setting or a library,
and otherwise when the first library is imported, before that library is found. Most processes that import the package
at their start, or through a start-up file, never import a library, and pay for one small module only.
`diffusers_quantfix.activation` is loaded with the first library.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Every library with a patched module; a test compares it with the fixes.
LIBRARIES = frozenset(
    ("accelerate", "bitsandbytes", "diffusers", "optimum", "peft", "torchao", "transformers")
)
# Patched modules of torch: a program that imports one of them directly, before any library, must get the patched
# version. Torch itself does not import them, so a program without quantized models pays nothing.
OF_TORCH = frozenset(
    (
        "torch.distributed._composable.fsdp.fully_shard",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
    )
)


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
    except Exception:  # but after a KeyboardInterrupt the program may import the library again
        finder.woken = True
        raise
    finder.woken = True  # not earlier: an import in another thread must wait too
    return watched_spec(name, path, target) if name in OF_TORCH else None


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


def wait(finder: "Any") -> None:
    """Let ``finder`` wait for the first library and then wake the package; wake it now where that cannot wait.

    It cannot wait if there are settings, in which a typo must be reported, if a library is already imported, or if
    there is an earlier copy of the package to replace, which a program deleted from ``sys.modules``.
    """
    import os
    import sys

    forget()
    earlier = any(_module_of(other).startswith(f"{__package__}.") for other in sys.meta_path)
    imported = not LIBRARIES.isdisjoint(sys.modules) or not OF_TORCH.isdisjoint(sys.modules)
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


def _waits(finder: "Any") -> bool:
    function = type(_waits)
    return type(finder) is function and (finder.__name__, finder.__module__) == (
        "_first_library",
        __package__,
    )


def warn(sentence: str) -> None:
    """Log a warning.  Never raises: it is called inside imports of other libraries and at interpreter shutdown."""
    try:
        import logging

        logging.getLogger(__package__).warning("%s", sentence)
    except Exception:
        pass
