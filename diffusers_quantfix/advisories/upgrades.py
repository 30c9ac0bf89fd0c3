"""Which releases of the libraries fix what was found."""

from __future__ import annotations

from packaging.utils import canonicalize_name
from packaging.version import Version

from ..fixes.targets import TARGETS
from .combinations import misfitting
from .findings import findings, fixing_releases
from .ranges import alternatives, exact_version, inside, raised

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .findings import Finding


class Upgrade:
    """What the smallest releases that fix something would change.

    Attributes:
        releases: distribution -> version; more than one if they only fix it together.
        fixes: ids of the bugs (names of targets) that they fix, those of smaller upgrades included.
        brings: ids of known bugs that these pins do not have and would then have.
        or_newer: whether the pins also allow newer releases, so that the versions are minimum versions.
        conflicts: sentences about releases that would then be incompatible.
    """

    __slots__ = ("brings", "conflicts", "fixes", "or_newer", "releases")

    def __init__(
        self,
        releases: dict[str, str],
        fixes: list[str],
        brings: list[str],
        or_newer: bool = False,
        conflicts: Iterable[str] = (),
    ) -> None:
        self.releases = releases
        self.fixes = fixes
        self.brings = brings
        self.or_newer = or_newer
        self.conflicts = list(conflicts)

    def to_dict(self) -> dict[str, object]:
        """The upgrade as data: the arguments of its constructor."""
        return {
            "releases": dict(self.releases),
            "fixes": list(self.fixes),
            "brings": list(self.brings),
            "or_newer": self.or_newer,
            "conflicts": list(self.conflicts),
        }

    def __str__(self) -> str:
        releases = " with ".join(f"{name} {version}" for name, version in self.releases.items())
        newer = " or newer" if self.or_newer else ""
        brings = f"; it brings {', '.join(self.brings)}" if self.brings else ""
        conflicts = "".join(f"; but {sentence}" for sentence in self.conflicts)
        return f"{releases}{newer} fixes {', '.join(self.fixes)}{brings}{conflicts}"


def upgrades(pins: Mapping[str, str], found: Iterable[Finding], complete: bool = False) -> list[Upgrade]:
    """The releases that fix something that was found, per library from the smallest on.

    A pin of one version becomes the release; a range keeps what it allows above it.  So no upgrade counts as the fix of
    a bug that newer releases have which the pins allow, and none asks for an older release than a pin does.  One
    that brings a bug which a later release of the same libraries has fixed gives way to that.

    Args:
        pins: distribution -> pin.
        found: what to fix.
        complete: whether what is not named is not there, as in a lock file.
    """
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    found = list(found)
    have = {finding.id for finding in found}
    misfits = {sentence for _, sentence in misfitting(pins)}
    fixed_in = {name: fixing_releases(target) for name, target in TARGETS.items()}
    made: list[Upgrade] = []
    for step in _steps(pins, found, complete):
        # a library that only others bring along is not brought by its upgrade
        named: dict[str, str] = {canonicalize_name(name): "" for name in step}
        named.update(pins)
        now = {finding.id for finding in findings(named, complete=complete)}
        releases = step
        while True:
            changed = _changed(pins, releases)
            then = {finding.id for finding in findings(changed, complete=complete)}
            later = [fixed_in[brought] for brought in then - now if set(fixed_in[brought]) <= set(releases)]
            higher = {
                name: str(max(Version(one.get(name, version)) for one in (releases, *filter(None, later))))
                for name, version in releases.items()
            }
            if higher == releases:
                break
            releases = higher
        if have - then and releases not in [upgrade.releases for upgrade in made]:
            made.append(
                Upgrade(
                    releases,
                    sorted(have - then),
                    sorted(then - now),
                    any(not _is_exact(changed[canonicalize_name(name)]) for name in releases),
                    [
                        f"{versions}: {sentence}"
                        for versions, sentence in misfitting(changed)
                        if sentence not in misfits
                    ],
                )
            )
    return made


def _steps(pins: Mapping[str, str], found: Iterable[Finding], complete: bool) -> list[dict[str, str]]:
    """Distribution -> release of each upgrade that a finding asks for, in the order of the report."""
    steps: list[dict[str, str]] = []
    for finding in found:
        releases = fixing_releases(finding.target)
        if complete and any(canonicalize_name(name) not in pins for name in releases):
            continue  # what is not installed cannot be upgraded
        needed = {
            name: version
            for name, version in releases.items()
            if inside(f">={version}", pins.get(canonicalize_name(name), "")) != "yes"
        }
        if needed and needed not in steps:
            steps.append(needed)
    return sorted(
        steps, key=lambda step: (len(step), list(step), [Version(version) for version in step.values()])
    )


def _changed(pins: Mapping[str, str], releases: Mapping[str, str]) -> dict[str, str]:
    changed = dict(pins)
    for name, version in releases.items():
        name = canonicalize_name(name)
        changed[name] = raised(pins.get(name, ""), version)
    return changed


def _is_exact(pin: str) -> bool:
    return all(exact_version(specifier) is not None for specifier in alternatives(pin))
