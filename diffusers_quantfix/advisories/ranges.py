"""Compares version specifiers with each other, without a list of the existing releases.

A pin is a PEP 440 specifier (``==0.33.1``, ``>=0.33,<0.36``, empty for any version), or several with ``||`` between
them where a file leaves a choice: a lock file with one version per platform, or two extras that contradict each other.

Whether one version lies in a range is decided in `engine.versions.contains` alone.
"""

from __future__ import annotations

import functools

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..engine.versions import contains

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from packaging.specifiers import Specifier

_OPPOSITE = {">=": "<", "<": ">=", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}


def alternatives(pin: str) -> list[str]:
    """The specifiers of a pin."""
    return [part.strip() for part in pin.split("||")]


def either(pins: Iterable[str]) -> str:
    """The pin that has these specifiers as alternatives."""
    return " || ".join(dict.fromkeys(pins))


def both(first: str, second: str) -> str:
    """The pin if both are required; the two as alternatives if nothing fits both."""
    joined = [
        ",".join(filter(None, dict.fromkeys((one, other))))
        for one in alternatives(first)
        for other in alternatives(second)
        if overlap(one, other)
    ]
    return either(joined or [*alternatives(first), *alternatives(second)])


def last_seen(specifier: str) -> str:
    """The newest release in an open claim: the version of its ``<=``; empty for a closed or unbounded one."""
    bounds = [part.strip()[2:] for part in specifier.split(",") if part.strip().startswith("<=")]
    return bounds[0] if len(bounds) == 1 else ""


@functools.lru_cache(maxsize=1024)
def comparable(specifier: str) -> bool:
    """Whether every version of a specifier can be compared: ``===weird`` and 5000 digits cannot."""
    try:
        return all(Version(_bound(part)) is not None for part in SpecifierSet(specifier))
    except ValueError:  # packaging's own errors are ValueErrors, and so is that of `int` for too many digits
        return False


def fits(specifier: str, version: str) -> bool:
    """Whether a version is in a range; one that cannot be compared is in none."""
    try:
        return contains(specifier, version)
    except ValueError:
        return False


def exact_version(specifier: str) -> str | None:
    """The one version that a specifier allows, None for a range."""
    for part in _parts(specifier):
        if part.operator == "===" or (part.operator == "==" and not part.version.endswith(".*")):
            return part.version
    return None


@functools.lru_cache(maxsize=4096)
def overlap(first: str, second: str) -> bool:
    """Whether some version is in both ranges.

    Ranges are unions of intervals, and two of those meet, if they do, at the lower bound of one of them or just above
    it.  A version that cannot be compared (``===weird``) is in no range but its own.
    """
    for one, other in ((first, second), (second, first)):
        exact = exact_version(one)
        if exact is not None:
            try:
                return contains(one, exact) and contains(other, exact)
            except InvalidVersion:
                return exact_version(other) in (exact, None) and not SpecifierSet(other)
    bounds = [Version(_bound(part)) for text in (first, second) for part in _parts(text)]
    # a release has three numbers, or as many as the longest that is named
    numbers = max(3, *(len(bound.release) for bound in bounds)) if bounds else 3
    points = ["0"]
    for bound in bounds:
        release = [*bound.release, *[0] * (numbers - len(bound.release))]
        just_above = ".".join(map(str, [*release[:-1], release[-1] + 1]))
        points += [str(bound), f"{bound.epoch}!{just_above}"]
        if bound.pre is not None:
            points.append(f"{bound.epoch}!{'.'.join(map(str, bound.release))}rc99999")
    return any(contains(first, point) and contains(second, point) for point in points)


@functools.lru_cache(maxsize=4096)
def inside(claim: str, pin: str) -> str:
    """Whether the versions of a pin are in a range: "yes" (all of them), "perhaps" (some), or "" (none)."""
    hits = []
    for specifier in alternatives(pin):
        exact = exact_version(specifier)
        if exact is None:
            outside = [
                f"{_OPPOSITE[part.operator]}{part.version}" if part.operator in _OPPOSITE else ""
                for part in _parts(claim)
            ]
            if not overlap(claim, specifier):
                hits.append("")
            else:
                hits.append("perhaps" if any(overlap(part, specifier) for part in outside) else "yes")
            continue
        try:
            hits.append("yes" if contains(claim, exact) else "")
        except InvalidVersion:
            hits.append("perhaps")
    if not any(hits):
        return ""
    return "yes" if all(hit == "yes" for hit in hits) else "perhaps"


def raised(pin: str, version: str) -> str:
    """The pin after an upgrade to a release: what a pin allows above that release stays allowed, what it allows below
    is gone, and a pin of older releases only becomes that release.
    """
    floor = f">={version}"
    return either(
        ",".join(filter(None, (specifier, floor if exact_version(specifier) is None else "")))
        if overlap(floor, specifier)
        else f"=={version}"
        for specifier in alternatives(pin)
    )


def _parts(specifier: str) -> list[Specifier]:
    return sorted(SpecifierSet(specifier), key=str)  # the set itself has no order


def _bound(part: Specifier) -> str:
    return part.version.removesuffix(".*")
