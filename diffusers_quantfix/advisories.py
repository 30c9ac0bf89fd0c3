"""Which defects does a set of pinned versions have?  Answered from the declarations of the fixes; no library of the
stack is imported, no registry is asked.
"""

from __future__ import annotations

import importlib

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from .engine.versions import contains, installed_version
from .fixes import DISTRIBUTIONS, INDEX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .engine.fix import Fix

SELF = "diffusers-quantfix"
AFFECTED = "affected"
MAYBE = "may be affected"


class Finding:
    """One defect that the pins have, or may have.

    Attributes:
        fix: the declaration of the fix.
        verdict: "affected" when every version is known, else "may be affected".
        why: the versions or ranges that fit, as a sentence.
        mended: whether the diffusers-quantfix that the same pins name mends it.
    """

    __slots__ = ("fix", "mended", "verdict", "why")

    def __init__(self, fix: Fix, verdict: str, why: str, mended: bool) -> None:
        self.fix = fix
        self.verdict = verdict
        self.why = why
        self.mended = mended

    def to_dict(self) -> dict[str, object]:
        """The finding for machines."""
        return {
            "id": self.fix.id,
            "title": self.fix.title,
            "symptom": self.fix.symptom,
            "verdict": self.verdict,
            "why": self.why,
            "mended": self.mended,
            "claims": dict(self.fix.claims),
            "healed": self.fix.healed,
            "upstream": list(self.fix.upstream),
        }


def declarations() -> list[Fix]:
    """Every fix's declaration, in the order of the ids."""
    package = __name__.rpartition(".")[0]
    return [importlib.import_module(f"{package}.fixes.{INDEX[fix_id][0]}").FIX for fix_id in sorted(INDEX)]


def findings(pins: Mapping[str, str]) -> list[Finding]:
    """The defects of a set of requirements.

    Args:
        pins: distribution -> specifier (``==0.33.1``, ``>=0.33,<0.36``, empty for any version).

    Returns:
        What is affected, or may be.  A fix whose own library is not named is left out; one whose other
        distributions are not named may apply.
    """
    pins = {canonicalize_name(name): specifier for name, specifier in pins.items()}
    named = SELF in pins
    found = []
    for fix in declarations():
        verdict, why = _judge(fix, pins)
        if verdict:
            found.append(Finding(fix, verdict, why, named))
    return found


def environment_pins() -> dict[str, str]:
    """The versions installed in this environment, as pins."""
    versions = {name: installed_version(name) for name in (*DISTRIBUTIONS, SELF)}
    return {name: f"=={version}" for name, version in versions.items() if version}


def _judge(fix: Fix, pins: Mapping[str, str]) -> tuple[str, str]:
    library = next(iter(fix.claims))  # the one that owns the target stands first
    if canonicalize_name(library) not in pins:
        return "", ""
    certain = True
    why = []
    for distribution, claim in fix.claims.items():
        pin = pins.get(canonicalize_name(distribution))
        if pin is None:
            certain = False
            why.append(f"{distribution} is not named")
            continue
        exact = exact_version(pin)
        if exact is not None:
            if not contains(claim, exact):
                return "", ""
            why.append(f"{distribution} {exact}")
        else:
            if not overlap(claim, pin):
                return "", ""
            # every version of the pin is claimed when none lies outside: only "any version" is sure of that
            certain = certain and not SpecifierSet(claim)
            why.append(f"{distribution} {pin or '(any version)'}")
    return (AFFECTED if certain else MAYBE), ", ".join(why)


def exact_version(pin: str) -> str | None:
    """The one version that a specifier allows, None for a range."""
    for part in SpecifierSet(pin):
        if part.operator == "===" or (part.operator == "==" and not part.version.endswith(".*")):
            return part.version
    return None


def overlap(first: str, second: str) -> bool:
    """Whether some version lies in both ranges.

    Ranges are unions of intervals, and two of those meet, if they do, at a bound of one of them or just above it.
    """
    bounds = {part.version.removesuffix(".*") for text in (first, second) for part in SpecifierSet(text)}
    points = {"0", "999999"}
    for bound in bounds:
        version = Version(bound)
        release = (*version.release, 0, 0)[:3]
        points |= {bound, f"{release[0]}.{release[1]}.{release[2] + 1}", f"{release[0]}.{release[1] + 1}"}
        points |= {
            f"{release[0]}.{release[1]}.{max(release[2] - 1, 0)}",
            f"{release[0]}.{max(release[1] - 1, 0)}.9999",
        }
    return any(contains(first, point) and contains(second, point) for point in points)


def by_release(found: Iterable[Finding]) -> dict[str, list[str]]:
    """Upgrade -> the ids of the fixes that it retires, for the findings that upstream has healed."""
    upgrades: dict[str, list[str]] = {}
    for finding in found:
        if finding.fix.healed:
            upgrades.setdefault(finding.fix.healed, []).append(finding.fix.id)
    return upgrades
