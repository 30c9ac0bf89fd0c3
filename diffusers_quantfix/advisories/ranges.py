"""Version specifiers held against each other, without a list of the releases that exist.

A pin is a PEP 440 specifier (``==0.33.1``, ``>=0.33,<0.36``, empty for any version), or several with ``||`` between
them where a file leaves a choice: a lock file with one version per platform, or two extras that contradict each other.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..engine.versions import contains


def alternatives(pin: str) -> list[str]:
    """The specifiers of a pin."""
    return [part.strip() for part in pin.split("||")]


def either(pins: list[str]) -> str:
    """The pin that leaves the choice between these specifiers."""
    return " || ".join(dict.fromkeys(pins))


def both(first: str, second: str) -> str:
    """What holds when both are demanded; the choice between them where nothing fits both."""
    joined = [
        ",".join(filter(None, dict.fromkeys((one, other))))
        for one in alternatives(first)
        for other in alternatives(second)
        if overlap(one, other)
    ]
    return either(joined or [*alternatives(first), *alternatives(second)])


def exact_version(specifier: str) -> str | None:
    """The one version that a specifier allows, None for a range."""
    for part in SpecifierSet(specifier):
        if part.operator == "===" or (part.operator == "==" and not part.version.endswith(".*")):
            return part.version
    return None


def overlap(first: str, second: str) -> bool:
    """Whether some version lies in both ranges.

    Ranges are unions of intervals, and two of those meet, if they do, at a bound of one of them or just above it.
    A version that cannot be compared (``===weird``) lies in no range but its own.
    """
    for one, other in ((first, second), (second, first)):
        exact = exact_version(one)
        if exact is not None:
            try:
                return contains(one, exact) and contains(other, exact)
            except InvalidVersion:
                return exact_version(other) in (exact, None) and not SpecifierSet(other)
    bounds = {part.version.removesuffix(".*") for text in (first, second) for part in SpecifierSet(text)}
    points = {"0", "999999"}
    for bound in bounds:
        release = (*Version(bound).release, 0, 0)[:3]
        points |= {bound, f"{release[0]}.{release[1]}.{release[2] + 1}", f"{release[0]}.{release[1] + 1}"}
        points |= {
            f"{release[0]}.{release[1]}.{max(release[2] - 1, 0)}",
            f"{release[0]}.{max(release[1] - 1, 0)}.9999",
        }
    return any(contains(first, point) and contains(second, point) for point in points)


def inside(claim: str, pin: str) -> str:
    """Whether the versions of a pin lie in a range: "yes" (a version that does), "perhaps" (some may), or ""."""
    hits = []
    for specifier in alternatives(pin):
        exact = exact_version(specifier)
        if exact is None:
            # every version is claimed when none lies outside: only "any version" is sure of that
            hits.append("" if not overlap(claim, specifier) else "perhaps" if SpecifierSet(claim) else "yes")
            continue
        try:
            hits.append("yes" if contains(claim, exact) else "")
        except InvalidVersion:
            hits.append("perhaps")
    if not any(hits):
        return ""
    return "yes" if all(hit == "yes" for hit in hits) else "perhaps"
