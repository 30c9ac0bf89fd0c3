"""Reports when a target module has finished importing.

One finder for all targets is first on ``sys.meta_path``.  ``find_spec`` triggers nothing: libraries call
``importlib.util.find_spec("bitsandbytes")`` just to learn whether it is installed.  It only replaces the loader of a
target's spec with one that calls us after ``exec_module``.  Only builtins are used, to keep activation cheap; and our
own errors must never break the import of a target.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Thread -> the target whose arrival it is reporting now. Read by `diffusers_quantfix.forked`.
reporting: "dict[int, str]" = {}


class Watcher:
    """A finder for ``sys.meta_path``.

    Args:
        targets: full names of the modules to watch.
        arrived: called with the name of a target that has just been executed (for the first time, or by
            ``importlib.reload``), in the importing thread, while that module's import lock is still held.
        replaced: called when a later copy of the package replaces this one.
    """

    def __init__(
        self, targets: "Collection[str]", arrived: "Callable[[str], None]", replaced: "Callable[[], None]"
    ) -> None:
        self._targets = frozenset(targets)
        self._arrived = arrived
        self._replaced = replaced
        self.replaced = False  # by a later copy of the package
        # (thread, name) of the running searches: another tool's finder may itself search all of sys.meta_path, and must
        # not call us again.
        self._asking: set[tuple[int, str]] = set()

    def start(self) -> None:
        """Put the finder first on ``sys.meta_path``; safe to call twice."""
        if not self.watching:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Remove the finder; safe to call twice.  Running imports still report."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def replace_other_copies(self) -> bool:
        """Remove the watchers of other copies of the package; returns whether there was one.

        There is one if a program deleted the package from ``sys.modules`` and imported it again, or if a copy is
        vendored under another name; two that patch the same target would undo each other's work, or do it twice.
        """
        others = self._others()
        for finder in others:
            finder.step_down()
        return bool(others)

    def other_names(self) -> bool:
        """Whether a copy that is vendored under another name watches."""
        return any(type(finder).__module__ != __name__ for finder in self._others())

    def _others(self) -> "list[Any]":
        """The watchers of other copies of the package."""
        return [finder for finder in sys.meta_path if finder is not self and _is_watcher(finder)]

    def step_down(self) -> None:
        """Stop, and remove what this copy of the package installed."""
        self.stop()
        self.replaced = True
        self._replaced()

    @property
    def watching(self) -> bool:
        """Whether the finder is on ``sys.meta_path``."""
        return any(finder is self for finder in sys.meta_path)

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec from the other finders, with a loader that reports; None for everything but a target."""
        if name not in self._targets:
            return None
        key = (get_ident(), name)
        if key in self._asking:
            return None
        try:
            self._asking.add(key)
            spec = self._ask_the_others(name, path, target)
            if spec is not None and _can_be_wrapped(spec.loader):
                spec.loader = ReportingLoader(spec.loader, name, self._arrived)  # type: ignore[assignment]
            return spec
        except Exception as error:  # the import continues without us, and meets the same error if it is real
            if is_theirs(error):  # which it would not meet again
                raise
            return None
        finally:
            self._asking.discard(key)

    def _ask_the_others(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def is_theirs(error: Exception) -> bool:
    """Whether the program raised it in the middle of our code."""
    try:
        from .interruptions import is_interruption

        return is_interruption(error)
    except Exception:  # that file is damaged
        return False


def _is_watcher(finder: object) -> bool:
    kind = type(finder)
    try:
        named = kind.__name__ == Watcher.__name__ and kind.__module__.endswith(".engine.watcher")
        return bool(named and hasattr(finder, "step_down"))
    except Exception:  # attributes of other code's classes may raise
        return False


def _can_be_wrapped(loader: object) -> bool:
    # A namespace package has no loader, and old-style loaders have no exec_module.  Both are found by the sweep over
    # sys.modules at every arrival and every status().
    if isinstance(loader, ReportingLoader):  # from a finder that returns the same spec again
        return False
    return hasattr(loader, "exec_module") and hasattr(loader, "create_module")


class ReportingLoader:
    """Replaces a target's loader until the module is executed, then restores the module's own loader, so that
    ``inspect.getsource``, ``importlib.resources`` and ``pkgutil`` never see this one."""

    def __init__(self, loader: "Any", name: str, arrived: "Callable[[str], None]") -> None:
        self._loader = loader
        self._name = name
        self._arrived = arrived

    def __getattr__(self, name: str) -> "Any":
        if name == "_loader":  # unpickled or copied before __init__ ran
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        thread = get_ident()
        before = reporting.get(thread)
        reporting[thread] = self._name
        try:
            self._arrived(self._name)
        finally:
            if before is None:
                reporting.pop(thread, None)
            else:
                reporting[thread] = before


COMPLETE = True  # the last line: `activation` imports it, so a truncated copy of this file fails to import
