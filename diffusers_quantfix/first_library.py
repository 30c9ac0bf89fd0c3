"""Waits for the first of the libraries: all that the import of this package leaves behind while none is imported.

Most processes that import the package at their start, or through a start-up file, never import one of them: those
pay for two small modules.  `diffusers_quantfix.activation` comes with the first library, before it is found: the
package hands `wait` the function that loads it.

``os`` and ``sys`` are imported within the functions: what a finder leads to, through the globals of its methods,
outlives the other modules at the end of the interpreter and is cleared one by one, a percent of a bare start.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeGuard

# Whatever has a module that is patched; a test holds it against the fixes.
LIBRARIES = frozenset(("accelerate", "bitsandbytes", "diffusers", "optimum", "peft", "transformers"))


class FirstLibrary:
    """A finder that finds nothing.  When one of the libraries is asked for, it activates the package first.

    Args:
        wake: activates the package.
    """

    woken = False

    def __init__(self, wake: "Callable[[], None]") -> None:
        self.wake = wake

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in LIBRARIES and not self.woken:
            try:
                self.wake()
            finally:
                self.woken = True  # not earlier: another thread's library waits as well


def wait(wake: "Callable[[], None]") -> None:
    """Call ``wake`` when the first library is asked for; at once where that cannot wait.

    Settings are read at once, so that a typo in them is reported; libraries may be there already; and an earlier copy
    of the package, which a program deleted from ``sys.modules``, must give up its place.
    """
    import os
    import sys

    forget()
    earlier = any(type(finder).__module__.startswith(f"{__package__}.") for finder in sys.meta_path)
    if os.environ.get("DIFFUSERS_QUANTFIX") or earlier or not LIBRARIES.isdisjoint(sys.modules):
        wake()
    else:
        sys.meta_path.insert(0, FirstLibrary(wake))


def waiting() -> bool:
    """Whether nothing has activated the package yet."""
    import sys

    return any(_waits(finder) and not finder.woken for finder in sys.meta_path)


def give_way(finder: object) -> bool:
    """Put another finder into the place of the one that waits; False when there is none.

    Into its very place: the search that is under way counts the finders, and so may whoever has put one before it.
    """
    import sys

    for position, here in enumerate(sys.meta_path):
        if _waits(here):
            sys.meta_path[position] = finder  # type: ignore[call-overload]  # whoever calls it has a finder
            return True
    return False


def forget() -> None:
    """Take away what waits, that of earlier copies of the package as well."""
    import sys

    sys.meta_path[:] = [finder for finder in sys.meta_path if not _waits(finder)]


def _waits(finder: "Any") -> "TypeGuard[FirstLibrary]":
    kind = type(finder)
    return (kind.__module__, kind.__name__) == (FirstLibrary.__module__, FirstLibrary.__name__)


def warn(sentence: str) -> None:
    """Log it.  Called inside imports of others, at the end of the interpreter too: a fault ends here."""
    try:
        import logging

        logging.getLogger(__package__).warning("%s", sentence)
    except Exception:
        pass
