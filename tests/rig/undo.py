"""Sets attributes and puts the old ones back."""

from __future__ import annotations

_MISSING = object()


class Undo:
    """``set`` attributes inside a ``with`` block; on exit everything is undone, the last change first."""

    def __enter__(self) -> Undo:
        self._steps = []
        return self

    def __exit__(self, *exc) -> None:
        while self._steps:
            step, *args = self._steps.pop()
            step(*args)

    def set(self, owner, name: str, value) -> None:
        old = vars(owner).get(name, _MISSING)  # the owner's own attribute, not an inherited one
        self._steps.append((delattr, owner, name) if old is _MISSING else (setattr, owner, name, old))
        setattr(owner, name, value)

    def call(self, step, *args) -> None:
        """Call ``step(*args)`` on exit."""
        self._steps.append((step, *args))
