"""The code on which each fix was proved, and what has changed in the installed releases.

A claim ends at the newest release on which a fix was proved.  The proof also holds in a newer release if the code that
the fix relies on is the same (`same_code`).  The data file is written by `tests.upstream.proved_code`, and is read only
if an installed release is above a claim.
"""

from __future__ import annotations

import sys

from .errors import Undecided
from .interruptions import heed_interruption
from .target import finished, is_missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

__all__ = ["Proofs"]


class Proofs:
    """The proofs of all targets.

    Args:
        path: the data file; if it is missing, nothing was proved.
        packages: distribution -> package, if the names differ.
        below: called with (owner, name, value), returns the library's own value there, below our patches.

    Attributes:
        releases: distribution -> the release in which the code was recorded; like all data, read on first use.
    """

    def __init__(self, path: str, packages: Mapping[str, str], below: Callable[[Any, str, Any], Any]) -> None:
        self._path = path
        self._packages = packages
        self._below = below
        self._data: dict[str, Any] = {}
        self._looked_at: dict[str, Any] = {}  # module name -> the module that was looked at completely
        self._changed: dict[str, str] = {}  # piece -> the phrase that says what has changed
        self._to_come: set[str] = set()  # pieces that a module that is being imported does not have yet
        # Missing piece -> how many modules were imported when it was searched for, and where it was found.
        self._moved: dict[str, tuple[int, str]] = {}

    def release(self, distribution: str) -> str:
        """The release of a distribution in which the code was recorded; empty if none was."""
        return str(self._read("releases").get(distribution) or "")

    def pieces(self, target: str) -> dict[str, str]:
        """What a target relies on: name of a piece of code -> its mark; empty if nothing was recorded."""
        marks = self._read("pieces")
        return {name: marks[name] for name in self._named(target)}

    def changes(self, target: str, distributions: Iterable[str], complete: str = "") -> list[str] | None:
        """How the code that a target relies on differs from the proved code: one phrase each; None without a proof.

        Args:
            target: its name.
            distributions: those whose code is compared.
            complete: the target's module, which is completely executed although its import has not returned.

        Raises:
            Undecided: a module with some of the code is not imported yet, or only partly.
        """
        pieces = self._named(target)
        if not pieces:
            return None
        packages = {self._packages.get(name, name) for name in distributions}
        wanted = [name for name in pieces if name.partition(":")[0].partition(".")[0] in packages]
        for home in dict.fromkeys(name.partition(":")[0] for name in wanted):
            self._look_at(home, home == complete)
        for name in wanted:
            if name in self._to_come:
                raise Undecided(name.partition(":")[0])
        return list(dict.fromkeys(self._changed[name] for name in wanted if name in self._changed))

    def with_place(self, phrase: str) -> str:
        """A phrase from `changes`; for a missing function it adds where the code is now, if that module is imported."""
        from .code_marks import CALLED
        from .same_code import GONE, moved_to

        if not phrase.endswith(GONE):
            return phrase
        name, known, marks = phrase.removesuffix(GONE), len(sys.modules), self._read("pieces")
        if self._moved.get(name, (0, ""))[0] != known:
            places = (moved_to(one, marks[one], self._below) for one in (name, name + CALLED) if one in marks)
            self._moved[name] = known, next(filter(None, places), "")
        place = self._moved[name][1]
        return f"{name} has moved to {place}" if place else phrase

    def _look_at(self, home: str, complete: bool) -> None:
        """Compare all pieces in one module at once, so that its file is read once and not kept."""
        from .code_marks import Files  # neither is loaded if every claim fits
        from .same_code import GONE, difference

        module = sys.modules.get(home)
        if module is None and _exists(home):
            raise Undecided(home)
        if self._looked_at.get(home, self) is module:
            return
        files, still_imported = Files(), module is not None and not complete and finished(home) is None
        names, marks = self._read("names"), self._read("pieces")
        number, final = self._read("first of").get(home, len(names)), True
        while number < len(names) and (name := names[number]).startswith(f"{home}:"):
            number += 1
            self._to_come.discard(name)
            self._changed.pop(name, None)
            phrase = difference(name, marks[name], files, self._below)
            if phrase.endswith(GONE) and still_imported:
                self._to_come.add(name)
                final = False
            elif phrase:
                self._changed[name] = phrase
        if final:
            self._looked_at[home] = module

    def _named(self, target: str) -> list[str]:
        names = self._read("names")
        return [names[int(number)] for number in self._read("targets").get(target, "").split()]

    def _read(self, part: str) -> Any:
        if not self._data:
            import json

            data: dict[str, Any] = {"releases": {}, "pieces": {}, "targets": {}}
            try:
                with open(self._path, encoding="utf-8") as file:
                    data.update(json.load(file))
            except (OSError, ValueError) as error:  # an incomplete installation: only claims count then
                heed_interruption(error)
            # Few objects that Python's garbage collector counts: of a heap with torch it takes a tenth of a second.
            data["names"], data["first of"] = list(data["pieces"]), {}
            for number, name in enumerate(data["names"]):
                data["first of"].setdefault(name.partition(":")[0], number)
            self._data = data
        return self._data[part]


def _exists(home: str) -> bool:
    """Whether a module that is not imported could be; if its package is not imported either, whether that could be."""
    package = home.rpartition(".")[0]
    if not package:
        return not is_missing(home)
    parent = sys.modules.get(package)
    if parent is None:
        return _exists(package)
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(home, getattr(parent, "__path__", None)) is not None
