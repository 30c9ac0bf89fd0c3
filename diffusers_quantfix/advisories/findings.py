"""Which bugs does a set of pinned versions have?  Answered from the fixes' declarations, without importing a library or
querying a registry.
"""

from __future__ import annotations

from packaging.utils import canonicalize_name

from ..engine.versions import installed_version
from ..fixes import DISTRIBUTIONS
from ..fixes.targets import declarations
from .libraries import SELF
from .ranges import alternatives, comparable, exact_version, inside, last_seen, overlap
from .supported import RELEASES, TORCH, outside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ..engine.fix import Fix, Target

AFFECTED = "affected"
MAYBE = "may be affected"

# Required by `diffusers[torch]`, peft and others: they may be installed without being named.  Users of bitsandbytes,
# quanto, torchao or gguf name those.
BROUGHT_ALONG = ("torch", "transformers", "accelerate")


class Finding:
    """One bug that the pinned versions have, or may have, in one of the modules that a fix patches.

    Attributes:
        fix: the declaration of the fix.
        target: the target that it is about.
        verdict: "affected" if every version is known, else "may be affected".
        why: the matching versions or ranges, as a sentence.
        patched: whether the diffusers-quantfix in the same pins patches it.
        if_same_code: whether it does so only if the code is the same as where the fix was proved: a pinned release is
            newer than all in which the bug was seen, and versions alone do not tell.
    """

    __slots__ = ("fix", "if_same_code", "patched", "target", "verdict", "why")

    def __init__(
        self, fix: Fix, target: Target, verdict: str, why: str, patched: bool, if_same_code: bool = False
    ) -> None:
        self.fix = fix
        self.target = target
        self.verdict = verdict
        self.why = why
        self.patched = patched
        self.if_same_code = if_same_code

    @property
    def id(self) -> str:
        """The name of the target; for a fix with one target, that is the fix's id."""
        return self.target.name

    def to_dict(self) -> dict[str, object]:
        """The finding as data."""
        return {
            **advisory(self.fix, self.target),
            "verdict": self.verdict,
            "why": self.why,
            "patched": self.patched,
            "if_same_code": self.if_same_code,
        }


def advisory(fix: Fix, target: Target) -> dict[str, Any]:
    """The row of the table for one target of a fix.

    Returns:
        ``id`` (the name of the target), ``fix`` (the id of the fix), ``title``, ``symptom``, ``harm`` (see
        `advisories.harm`), ``claims`` (distribution -> specifier; all must fit), ``fixed_in`` ("bitsandbytes 0.45.3",
        releases that only fix together with " with " between them, empty while there are none), ``patched_since`` (the
        first diffusers-quantfix that patches it) and ``upstream`` (links).
    """
    return {
        "id": target.name,
        "fix": fix.id,
        "title": fix.title,
        "symptom": fix.symptom,
        "harm": fix.harm,
        "claims": dict(target.claims),
        "fixed_in": target.fixed_in,
        "patched_since": fix.since,
        "upstream": list(fix.upstream),
    }


def table() -> list[dict[str, Any]]:
    """Every advisory, ordered by fix id."""
    return [advisory(fix, target) for fix in declarations() for target in fix.targets]


def findings(
    pins: Mapping[str, str], required: Iterable[str] | None = None, complete: bool = False
) -> list[Finding]:
    """The bugs of a set of requirements.

    Args:
        pins: distribution -> pin (``==0.33.1``, ``>=0.33,<0.36``, empty for any version).
        required: the distributions that are required, not just constrained; None for all of them.
        complete: whether unnamed distributions are not installed, as in a lock file.

    Returns:
        What is affected, or may be, by target.  A target whose libraries are not all named is left out, unless the
        missing ones may come as dependencies.
    """
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    ours = pins.get(SELF) if required is None or SELF in required else None
    found = []
    for fix in declarations():
        for target in fix.targets:
            verdict, why, newer = _judge(target, pins, () if complete else BROUGHT_ALONG)
            if verdict:
                patched = _patches(fix, ours)
                found.append(Finding(fix, target, verdict, why, patched and not newer, patched and newer))
    return found


def fixing_releases(target: Target) -> dict[str, str]:
    """Distribution -> version of the releases that fix a bug; more than one if they only do so together."""
    releases = (release.partition(" ") for release in target.fixed_in.split(" with ") if release)
    return {name: version for name, _, version in releases}


def environment_pins() -> dict[str, str]:
    """The versions installed in this environment, as pins (empty if unreadable); this package counts as it runs."""
    from .. import __version__

    versions = {name: installed_version(name) for name in DISTRIBUTIONS}
    pins = {name: version and f"=={version}" for name, version in versions.items() if version is not None}
    return {name: pin if comparable(pin) else "" for name, pin in pins.items()} | {SELF: f"=={__version__}"}


def unknown_releases(pins: Mapping[str, str]) -> list[str]:
    """Sentences about pinned releases that are newer than all tested ones, and about a torch that is newer or older."""
    torches = filter(None, map(exact_version, alternatives(pins.get("torch", ""))))
    sentences = [said for torch in torches if (said := outside("torch", torch, TORCH))]
    for distribution, (_, version) in RELEASES.items():
        for pin in alternatives(pins.get(canonicalize_name(distribution), "")):
            exact = exact_version(pin)
            if exact and inside(f">{version}", pin) == "yes":
                sentences.append(
                    f"{distribution} {exact} is newer than {version}, the newest release that this {SELF} knows: "
                    "a bug that no release fixes may be present, and is patched only if the code its fix relies on "
                    "is the same"
                )
    return sentences


def _patches(fix: Fix, ours: str | None) -> bool:
    """Whether some diffusers-quantfix in each alternative of the pin has the fix; a range stands for its newest."""
    since = f">={fix.since}"
    return ours is not None and all(overlap(since, specifier) for specifier in alternatives(ours))


def _judge(target: Target, pins: Mapping[str, str], unnamed: tuple[str, ...]) -> tuple[str, str, bool]:
    """(verdict, why, whether a pin is newer than the releases in which the bug was seen); empty where it is not
    affected."""
    library = next(iter(target.claims))  # the owner of the target comes first
    if canonicalize_name(library) not in pins:
        return "", "", False
    certain, newer = True, False
    why = []
    for distribution, claim in target.claims.items():
        pin = pins.get(canonicalize_name(distribution))
        if pin is None:
            if distribution not in unnamed:
                return "", "", False
            certain = False
            why.append(f"{distribution} is not named")
            continue
        fits = inside(claim, pin)
        said = f"{distribution} {pin.removeprefix('==').replace('|| ==', 'or ') or '(any version)'}"
        last = last_seen(claim)
        if not fits and last and inside(f">{last}", pin) == "yes":
            certain, newer = False, True
            said += f", newer than {last}, the newest release with the bug that is known"
        elif not fits:
            return "", "", False
        certain = certain and fits == "yes"
        why.append(said)
    reached = [
        inside(f">={version}", pins.get(canonicalize_name(name), ""))
        for name, version in fixing_releases(target).items()
    ]
    if reached and all(reached):
        if all(answer == "yes" for answer in reached):
            return "", "", False
        certain = False
    return (AFFECTED if certain else MAYBE), ", ".join(why), newer
