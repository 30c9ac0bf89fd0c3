"""Waits for the first of the libraries, for a package that is imported before them.

The package's own `__init__` has the finder, and loads this where a setting or a library may be there already, and when
the first library is imported, before that library is found: most processes that import the package at their start, or
through a start-up file, never import one, and pay for one small module.  `diffusers_quantfix.activation` is loaded with
the first library.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Every library with a patched module; a test compares it with the fixes.
LIBRARIES = frozenset(
    ("accelerate", "bitsandbytes", "diffusers", "optimum", "peft", "torchao", "transformers")
)
# Patched modules of torch. Who imports one of them by name, before any library, is not to have it as it was. They are
# not imported by torch itself: a program without quantized models pays for nothing.
OF_TORCH = frozenset(
    (
        "torch.distributed._composable.fsdp.fully_shard",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
    )
)


def found(finder: "Any", name: str, path: "Any", target: "Any") -> "Any":
    """Activate the package, as the first library is searched for; what its watcher finds of torch.

    Args:
        finder: the one that waits; its ``wake`` activates the package, its ``woken`` is whether it did.
        name: the library, or the patched module of torch, as a finder is given it.
        path: the same.
        target: the same.
    """
    if finder.woken:
        return None
    try:
        finder.wake()
    finally:
        finder.woken = True  # not earlier: an import in another thread has to wait too
    return watched_spec(name, path, target) if name in OF_TORCH else None


def watched_spec(name: str, path: "Any", target: "Any") -> "Any":
    """What the watcher finds, for a search that is past its place; None where there is none."""
    import sys

    for finder in sys.meta_path:
        if _module_of(finder) == f"{__package__}.engine.watcher":
            return finder.find_spec(name, path, target)
    return None


def _module_of(finder: "Any") -> str:
    """The module of the class of a finder: a class of other code may have none, or raise when it is asked."""
    try:
        return str(type(finder).__module__)
    except Exception:
        return ""


def wait(finder: "Any") -> None:
    """Let ``finder`` wait for the first library, and wake the package; at once where that cannot wait.

    Settings are read at once, so that a typo in them is reported; libraries may be imported already; and an earlier
    copy of the package, which a program deleted from ``sys.modules``, must be replaced.
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
    """Whether the package is not activated yet."""
    import sys

    return any(_waits(finder) and not getattr(finder, "woken", True) for finder in sys.meta_path)


def give_way(finder: object) -> bool:
    """Replace the waiting finder by another one; False when there is none.

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
    """Log a warning.  Called inside imports of other libraries, and at the end of the interpreter: never raises."""
    try:
        import logging

        logging.getLogger(__package__).warning("%s", sentence)
    except Exception:
        pass
