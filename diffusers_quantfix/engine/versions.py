"""Whether a version claim fits the installed releases.

The answer comes from the metadata of the distributions; no library is imported.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
import sys
from importlib import metadata
from types import ModuleType

from .interruptions import heed_interruption

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.machinery import ModuleSpec
    from typing import Any

    from packaging.version import Version

    _State = tuple[tuple[str, int], ...]


class Verdict:
    """Whether a claim fits, and why, as a sentence.

    Attributes:
        kind: "fits", "out-of-range", "missing" (a distribution is not installed) or "unreadable" (an installed version
            is not a valid version).
        reason: one sentence; for "fits", the versions that were found.
        above: for "out-of-range": whether every release that does not fit is newer than its range, neither below it nor
            excluded from its middle.
        outside: for "out-of-range": distribution -> version, for those that do not fit.
    """

    __slots__ = ("above", "kind", "outside", "reason")

    def __init__(
        self, kind: str, reason: str, above: bool = False, outside: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.reason = reason
        self.above = above
        self.outside = dict(outside or {})

    @property
    def fits(self) -> bool:
        return self.kind == "fits"


class Installed:
    """Answers as `installed_version` does, for the many questions of one check: it looks at the folders on ``sys.path``
    for the first one only."""

    def __init__(self) -> None:
        self._state: _State | None = None

    def __call__(self, distribution: str) -> str | None:
        if self._state is None:
            self._state = _search_state()
        return installed_version(distribution, self._state)


def installed_version(distribution: str, state: _State | None = None) -> str | None:
    """The version of an installed distribution, from its metadata; None if it is not installed.

    Without metadata (vendored, frozen, built by Bazel) it is the module's ``__version__``; if there is none either, an
    empty string, which is not a valid version.  A lookup takes milliseconds, and an import of diffusers needs two
    hundred: the result is cached until something is installed or removed.

    Args:
        distribution: its name.
        state: a recent `_search_state`.
    """
    state = state or _search_state()
    answers = _answers.get(state)
    if answers is None:
        _answers.clear()
        answers = _answers[state] = {}
    if distribution not in answers:
        answers[distribution] = _read_version(distribution)
    if answers[distribution] is not None:
        return answers[distribution]
    for name in (distribution.replace("-", "."), distribution.replace("-", "_")):
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and isinstance(vars(module).get("__version__"), str):
            return str(module.__version__)
        written = f"code of {name}"
        if written not in answers:
            answers[written] = _written_version(name)
        if answers[written] is not None:
            return answers[written]
    return None


_answers: dict[_State, dict[str, str | None]] = {}


def _search_state() -> _State:
    """A value that changes when something is installed or removed: the folders on ``sys.path`` and their mtimes."""
    state = []
    for folder in sys.path:
        try:
            state.append((folder, os.stat(folder or ".").st_mtime_ns))
        except (OSError, ValueError, TypeError) as error:
            heed_interruption(error)
            state.append((str(folder), 0))
    return tuple(state)


def _read_version(distribution: str) -> str | None:
    # Not `metadata.version`: a program's tests may have replaced it, and the result is cached beyond them.
    found = _stated_by(lambda: metadata.Distribution.from_name(distribution))
    if found != "":
        return found
    # Other code's finders may raise, or return something for every name. Python's own finder, without them:
    context = metadata.DistributionFinder.Context(name=distribution)
    return _stated_by(lambda: next(iter(metadata.MetadataPathFinder.find_distributions(context)), None))


def _stated_by(find: Callable[[], metadata.Distribution | None]) -> str | None:
    """The version of a distribution; None if there is none, empty if its version cannot be read."""
    try:
        distribution = find()
        version = None if distribution is None else _version_of(distribution)
    except metadata.PackageNotFoundError:
        return None
    except Exception as error:
        heed_interruption(error)
        return ""
    return version if version is None or isinstance(version, str) else ""


def _version_of(distribution: metadata.Distribution) -> str:
    """As `metadata.Distribution.version`, which parses the whole file as a mail: the description too, each time."""
    text = distribution.read_text("METADATA") if type(distribution) is metadata.PathDistribution else None
    for line in (text or "").split("\n", 9)[:9]:
        header, colon, value = line.partition(":")
        if not (colon and header.replace("-", "").isalnum()):
            break
        if header == "Version":
            return value.lstrip(" \t")
    # Before Python 3.12 a METADATA file without a Version line gives None instead of an error.
    return distribution.version or ""


def _written_version(name: str) -> str | None:
    """The ``__version__`` in the code of a package that is not imported, or not completely; None if there is no such
    package, empty if its code does not set it.

    bitsandbytes sets it in its last line, after the modules that are patched have been imported.
    """
    import dis

    try:
        spec = _spec(name)
        if spec is None or spec.origin is None:  # a plain folder of that name
            return None
        before: Any = None
        for step in dis.get_instructions(spec.loader.get_code(name)):  # type: ignore[union-attr]  # guarded as a whole
            if step.opname == "STORE_NAME" and step.argval == "__version__" and str(before)[:1].isdigit():
                return str(before)
            before = step.argval if step.opname == "LOAD_CONST" else None
    except (ImportError, ValueError):  # a module without a spec, as a placeholder for a missing one
        return None
    except Exception as error:  # loaders of all kinds
        heed_interruption(error)
    return ""


def _spec(name: str) -> ModuleSpec | None:
    """The spec of a module, without importing its parent as `importlib.util.find_spec` does."""
    steps = name.split(".")
    spec = importlib.util.find_spec(steps[0])
    for end in range(2, len(steps) + 1):
        if spec is None:
            break
        folders, full = spec.submodule_search_locations, ".".join(steps[:end])
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(full, folders) for finder in finders)), None)
    return spec


@functools.lru_cache(maxsize=512)
def contains(specifier: str, version: str) -> bool:
    """Whether a release is in a range, with development builds ordered by time.

    PEP 440 puts ``0.36.0.dev0`` in neither ``<0.36`` nor ``>=0.36``.  A build from between two releases may resemble
    either of them, so it fits if it is below an upper bound by plain order, or if the release that it leads to fits;
    the probe decides from the code.  Local versions (``+cu121``) count as their release.

    Raises:
        packaging.version.InvalidVersion: ``version`` is not a valid version.
    """
    found = _parsed(version)
    return _contains(specifier, found) or (
        found.is_prerelease and _contains(specifier, _parsed(found.base_version))
    )


@functools.lru_cache(maxsize=512)
def _parsed(version: str) -> Version:
    from packaging.version import Version

    return Version(version)


def _contains(specifier: str, version: Version) -> bool:
    return not _against(specifier, version)


def _against(specifier: str, version: Version) -> list[str]:
    """The operators of those parts of a specifier that a version violates."""
    bounds = None if version.is_prerelease else _plain_bounds(specifier)
    if bounds is not None:
        public = _parsed(version.public)
        return [sign for sign, bound in bounds if not _ORDERS[sign](public, _parsed(bound))]
    # Loading it costs more than all answers of an import.
    from packaging.specifiers import SpecifierSet

    return [
        part.operator
        for part in SpecifierSet(specifier)
        if not (
            version < _parsed(part.version)
            if part.operator == "<" and version.is_prerelease
            else part.contains(version, prereleases=True)
        )
    ]


_ORDERS = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


def _plain_bounds(specifier: str) -> list[tuple[str, str]] | None:
    """The bounds of a specifier, if every part of it compares a final or post release by plain order: ``>=0.33,<0.36``;
    None if not."""
    found = []
    for part in specifier.split(",") if specifier else ():
        sign = part.rstrip("0123456789.")
        bound = part[len(sign) :]
        if sign not in _ORDERS or not bound.replace(".", "").isdigit():
            return None
        found.append((sign, bound))
    return found


def is_above(specifier: str, version: str) -> bool:
    """Whether a release outside a range is newer than all of it.

    Raises:
        packaging.version.InvalidVersion: ``version`` is not a valid version.
    """
    return {"<", "<="}.issuperset(_against(specifier, _parsed(version)))


def is_installed(distribution: str, specifier: str) -> bool:
    """Whether the installed release of a distribution is in a range; False if its version is unreadable.

    For fixes whose patch differs between releases that they all claim.
    """
    return judge({distribution: specifier}).fits


def judge(claims: Mapping[str, str], installed: Callable[[str], str | None] = installed_version) -> Verdict:
    """Compare every specifier of a claim with the installed distributions, or with those of ``installed``; all must
    fit."""
    try:
        from packaging.version import InvalidVersion
    except ImportError:  # our own dependency: without it we still give an answer with the next step
        return Verdict(
            "unreadable", "packaging is not installed, and versions cannot be compared without it; install it"
        )
    found: list[str] = []
    misfits: list[str] = []
    outside: dict[str, str] = {}
    above = True
    for distribution, specifier in claims.items():
        version = installed(distribution)
        if version is None:
            return Verdict("missing", f"{distribution} is not installed")
        try:
            # A module without a version matches any.
            inside = (not version and not specifier) or contains(specifier, version)
        except InvalidVersion:
            return Verdict(
                "unreadable",
                f"{distribution} states the version {version!r}, which is not valid; reinstall {distribution}",
            )
        if inside:
            found.append(f"{distribution} {version}".rstrip())
        else:
            misfits.append(f"{distribution} {version} is outside {specifier or 'any range'}")
            outside[distribution] = version
            above = above and is_above(specifier, version)
    if outside:
        return Verdict("out-of-range", " and ".join(misfits), above, outside)
    return Verdict("fits", ", ".join(found))
