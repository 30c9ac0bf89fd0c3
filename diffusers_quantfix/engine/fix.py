"""How a fix declares itself.

One file under ``fixes/`` holds one bug: a ``FIX`` declaration and two functions. The engine calls them like this:

``broken(module)``: is the bug in this module object? It is asked before patching, and again afterwards, when it must
    say False or the patch is removed (except with ``asked_once``, see `Fix`). It is also asked outside the claimed
    range, about releases that its author never saw. It changes nothing, and tests the behaviour of a tiny stand-in
    first, names and signatures next, source text last. It may raise `TargetMissing` (nothing to patch in this release)
    or `Undecided` (another module must be imported first).

``patch(module, draft)``: says what to write, through its draft only. The ledger writes the whole draft or nothing after
    it has returned. It is also run on healthy modules, to find out whose code is in its slots, and that draft is
    dropped: so it must have no side effects.

``in_use()``, if defined: why `revert` must not remove the patch now, as a sentence, or "".
    For a patch whose removal would damage a live object permanently.

The docstring of the file is the first argument of its declaration: ``FIX = Fix(__doc__, ...)``.  Its first line is the
title of the bug, and its entries "Symptom: ", "Cause: ", "Upstream: " and "Patch: " give the details.  ``Symptom``
begins with what a user sees: the error message first, then words that a user would search for; ``Upstream`` links to
issues and pull requests of the library.

These files are read without any library loaded, so this module imports none.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType


class Target:
    """One module that has a fix's bug, and the affected releases.

    Args:
        name: what users call this target alone.
        module: the full name of the module; its import triggers the fix.
        claims: distribution name -> version specifier; all must fit.  The upper end of a closed range is the newest
            release in which the bug was seen.
        fixed_in: the release that fixes it upstream ("bitsandbytes 0.45.3"), or releases that only fix it together,
            which no specifier can express ("diffusers 0.37.0 with bitsandbytes 0.48.0"); empty if there is none yet.
        fix: the id of the fix; set by `Fix`.
        file: the module of the fix's file, relative to the package of all fixes; from the index.
    """

    __slots__ = ("claims", "file", "fix", "fixed_in", "module", "name")

    def __init__(
        self,
        name: str,
        module: str,
        claims: Mapping[str, str] | Iterable[tuple[str, str]],
        fixed_in: str = "",
        fix: str = "",
        file: str = "",
    ) -> None:
        self.name = name
        self.module = module
        self.claims = dict(claims)
        self.fixed_in = fixed_in
        self.fix = fix
        self.file = file


class Fix:
    """The declaration of one fix.

    Args:
        text: the docstring of its file, from which `title`, `symptom` and `upstream` are read; None under ``python
            -OO``, see `declared`.
        id: its name in settings, lists and `explain`.
        targets: the modules that have the bug, if there are several; each has its own name, and is decided and patched
            separately.
        module: for a fix with one target, whose name is the fix's id: see `Target`.
        claims: the same.
        fixed_in: the same.
        harm: the kind of damage: "wrong result", "error", "memory or time" or "other".
        patterns: regular expressions that find the bug's error message in a text in which white space is reduced to one
            space, quotation marks are ``'`` and backticks are removed; none if the bug raises no error.
        frames: what else a traceback or description of this bug contains, to distinguish it from bugs with the same
            message: regular expressions, or ``file.py:function`` for a frame of a traceback.
        since: the first version of this package with the fix.
        hot: whether the patched code is reachable from a forward pass or a tensor method.
        asked_once: whether ``broken`` is about upstream's own code, which the patch wraps and leaves as it is. Such a
            probe cannot tell whether the patch works, and is not asked again while the patch is in place.
        options: what users can choose in the environment variable: ``<library>:<option>`` -> what it does.

    Raises:
        TypeError: besides ``targets`` there is something that each of them says for itself.
    """

    __slots__ = (
        "asked_once",
        "frames",
        "harm",
        "hot",
        "id",
        "options",
        "patterns",
        "since",
        "targets",
        "text",
    )

    def __init__(
        self,
        text: str | None,
        *,
        id: str,
        targets: tuple[Target, ...] = (),
        module: str = "",
        claims: Mapping[str, str] | None = None,
        fixed_in: str = "",
        harm: str = "error",
        patterns: tuple[str, ...] = (),
        frames: tuple[str, ...] = (),
        since: str = "0.1.0",
        hot: bool = False,
        asked_once: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if targets and (module or claims or fixed_in):
            raise TypeError(f"{id}: module, claims and fixed_in stand in each of the targets")
        self.text = text
        self.id = id
        self.targets = tuple(targets) or (Target(id, module, claims or {}, fixed_in),)
        for target in self.targets:
            target.fix = id
        self.harm = harm
        self.patterns = tuple(patterns)
        self.frames = tuple(frames)
        self.since = since
        self.hot = hot
        self.asked_once = asked_once
        self.options = dict(options or {})

    def target(self, name: str) -> Target:
        """The target with that name."""
        return next(target for target in self.targets if target.name == name)

    @property
    def title(self) -> str:
        """The bug in one line."""
        return (self.text or self.id).strip().partition("\n")[0].rstrip(".").replace("``", "")

    @property
    def symptom(self) -> str:
        """What a user sees."""
        return self.section("Symptom")

    @property
    def upstream(self) -> tuple[str, ...]:
        """Links to the issues, pull requests or code of the library."""
        words = (
            self.section("Upstream").replace(",", " ").replace(";", " ").replace("(", " ").replace(")", " ")
        )
        return tuple(word.rstrip(".:") for word in words.split() if word.startswith("https://"))

    def section(self, title: str) -> str:
        """One entry of the docstring, as one line; empty if there is no such entry."""
        found: list[str] = []
        inside = False
        for line in (self.text or "").split("\n"):
            head, colon, rest = line.partition(": ")
            if colon and head.isalpha() and head[0].isupper():
                inside, line = head == title, rest
            if inside:
                found.append(line)
        return " ".join(" ".join(found).split()).replace("``", "`")


def declared(module: ModuleType) -> Fix:
    """The declaration in a fix's module; its text is read from the source if the interpreter drops docstrings."""
    fix: Fix = module.FIX
    if fix.text is None:
        import ast

        loader = module.__spec__.loader if module.__spec__ else None
        source = loader.get_source(module.__name__) if hasattr(loader, "get_source") else None  # type: ignore[union-attr]
        fix.text = (ast.get_docstring(ast.parse(source)) if source else None) or ""
    return fix
