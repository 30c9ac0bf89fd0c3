"""Waits for the first of the libraries; until then this is all that the import of this package installs.

Most processes that import the package at their start, or through a start-up file, never import one of them: those pay
for two small modules only.  `diffusers_quantfix.activation` is loaded when the first library is imported, before that
library is found: the package passes the loading function to `wait`.

``os`` and ``sys`` are imported within the functions: modules that a finder references through the globals of its
methods outlive the other modules at the end of the interpreter and are cleared one by one, which costs a percent of a
bare start.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeGuard

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


class FirstLibrary:
    """A finder that finds nothing itself.  When one of the libraries is imported, it activates the package first.

    Args:
        wake: activates the package.
    """

    woken = False

    def __init__(self, wake: "Callable[[], None]") -> None:
        self.wake = wake

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if (name in LIBRARIES or name in OF_TORCH) and not self.woken:
            try:
                self.wake()
            finally:
                self.woken = True  # not earlier: an import in another thread has to wait too
            if name in OF_TORCH:
                return watched_spec(name, path, target)
        return None


def watched_spec(name: str, path: "Any", target: "Any") -> "Any":
    """What the watcher finds, for a search that is past its place; None where there is none."""
    import sys

    for finder in sys.meta_path:
        kind = type(finder)
        if (kind.__module__, kind.__name__) == (f"{__package__}.engine.watcher", "Watcher"):
            return finder.find_spec(name, path, target)
    return None


def wait(wake: "Callable[[], None]") -> None:
    """Call ``wake`` when the first library is imported; at once where it cannot wait.

    Settings are read at once, so that a typo in them is reported; libraries may be imported already; and an earlier
    copy of the package, which a program deleted from ``sys.modules``, must be replaced.
    """
    import os
    import sys

    forget()
    earlier = any(type(finder).__module__.startswith(f"{__package__}.") for finder in sys.meta_path)
    imported = not LIBRARIES.isdisjoint(sys.modules) or not OF_TORCH.isdisjoint(sys.modules)
    if os.environ.get("DIFFUSERS_QUANTFIX") or earlier or imported:
        wake()
    else:
        sys.meta_path.insert(0, FirstLibrary(wake))


def waiting() -> bool:
    """Whether the package is not activated yet."""
    import sys

    return any(_waits(finder) and not finder.woken for finder in sys.meta_path)


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


def _waits(finder: "Any") -> "TypeGuard[FirstLibrary]":
    kind = type(finder)
    return (kind.__module__, kind.__name__) == (FirstLibrary.__module__, FirstLibrary.__name__)


def warn(sentence: str) -> None:
    """Log a warning.  Called inside imports of other libraries, and at the end of the interpreter: never raises."""
    try:
        import logging

        logging.getLogger(__package__).warning("%s", sentence)
    except Exception:
        pass
