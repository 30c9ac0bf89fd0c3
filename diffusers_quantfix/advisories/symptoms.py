"""Which known bug does this text show?  A search over the fixes' declarations; no library is imported.

Each bug gets the weighted sum of its evidence (`evidence`), and so does the answer that it is none of them; the weights
are those with which the texts that people wrote are answered best.  A link to its upstream issue decides alone, and so
does a text of which the answer is known.
"""

from __future__ import annotations

import math
import re

from ..engine.versions import contains, installed_version
from ..fixes import DISTRIBUTIONS
from . import look_alikes
from .catalogue import catalogue, first_sentence, learned
from .evidence import EVIDENCE, NONE, Text, against, findings, message
from .texts import LIMIT, plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..engine.fix import Fix, Target

__all__ = ["LIMIT", "Match", "first_sentence", "look_alike", "plain", "search", "stated_versions"]

# Texts contain versions as `pip freeze`, `pip list`, `pip show` and `diffusers-cli env` print them.
_STATED = re.compile(
    r"\b("
    + "|".join(["pytorch", *DISTRIBUTIONS])
    + r")(?: version)?(?: \(GPU\?\))?(?:==|@| version: |: ?| Version: | |-)v?"
    r"(\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|rc|post)\d+)?)(?![\d.]*[%\w])",
    re.IGNORECASE,
)
NONE_OF_THEM = 0.5  # names no bug from this probability on that it is none
_LINKED = 20.0
_INSIDE = {True: 0.5, None: 0.0, False: -1.5}  # versions tell equals apart
_WORTH_NAMING = 0.03  # of all that is said for any bug


class Match:
    """One bug that the text may show.

    Attributes:
        fix: its declaration.
        score: how well it fits; only its order means something.
        by_message: whether the text contains its error message, a link to it or a frame that only it has; otherwise
            only terms of its description matched.
        elsewhere: whether the text contains its message, below a traceback that has none of its frames.
        frames: how many of `Fix.frames` the text has.
        inside: whether the versions are in the affected range; None if they are not known.
    """

    __slots__ = ("by_message", "elsewhere", "fix", "frames", "inside", "score")

    def __init__(
        self, fix: Fix, score: float, by_message: bool, elsewhere: bool, frames: int, inside: bool | None
    ) -> None:
        self.fix = fix
        self.score = score
        self.by_message = by_message
        self.elsewhere = elsewhere
        self.frames = frames
        self.inside = inside


def stated_versions(text: str) -> dict[str, str]:
    """The versions that a text states: distribution -> version."""
    found = {name.lower(): version for name, version in _STATED.findall(plain(text))}
    if "pytorch" in found:
        found.setdefault("torch", found.pop("pytorch"))
    return found


def search(
    text: str,
    fixes: Iterable[Fix],
    installed: Callable[[str], str | None] = installed_version,
) -> list[Match]:
    """The bugs that a text may show, best match first; none if it is more likely about something else.

    Args:
        text: an error message, a traceback, a log that ends with one, or a description.
        fixes: the declarations to search.
        installed: returns the installed version of a distribution; versions stated in the text take precedence.
    """
    read, known = Text(text), catalogue(tuple(fixes))
    if not read.terms and not read.names:
        return []
    earlier, weights, weights_of_none = learned()
    parts = (*read.readings, read.terms)
    asked, answered = earlier.alike(parts), earlier.known(parts)
    found = findings(read, known, asked)
    if read.is_general and not answered and not any(one.by_message for one in found):
        return []
    for_none = _sum(NONE, against(read, asked, any(one.message for one in found)), weights_of_none)
    scores = [
        _sum(EVIDENCE, one.numbers, weights) + _LINKED * (one.linked or fix.id in answered)
        for fix, one in zip(known.fixes, found, strict=True)
    ]
    best = max(scores)
    shares = [math.exp(score - best) for score in scores]
    if math.exp(min(for_none - best, 50.0)) / sum(shares) >= NONE_OF_THEM / (1 - NONE_OF_THEM):
        return []
    versions = stated_versions(text)
    matches = []
    for fix, one, score, share in zip(known.fixes, found, scores, shares, strict=True):
        if one.by_message or share >= _WORTH_NAMING * sum(shares):
            inside = _inside(fix, lambda name: versions.get(name) or installed(name))
            score += _INSIDE[inside]
            matches.append(Match(fix, score, one.by_message, one.unsure, one.frames, inside))
    return sorted(matches, key=lambda match: (-match.score, match.fix.id))


def look_alike(text: str) -> str:
    """What a text that looks like one of the bugs really is, as a sentence; empty if unknown."""
    return look_alikes.look_alike(message(plain(text)))


def _sum(names: tuple[str, ...], numbers: list[float], weights: dict[str, float]) -> float:
    return sum(weights[name] * number for name, number in zip(names, numbers, strict=True))


def _inside(fix: Fix, known: Callable[[str], str | None]) -> bool | None:
    verdicts = [_target_inside(target, known) for target in fix.targets]
    return True if True in verdicts else None if None in verdicts else False


def _target_inside(target: Target, known: Callable[[str], str | None]) -> bool | None:
    verdicts = []
    for distribution, claim in target.claims.items():
        version = known(distribution)
        try:
            verdicts.append(contains(claim, version) if version else None)
        except (ValueError, ImportError):  # no valid version; packaging, our own dependency, is not there
            verdicts.append(None)
    if False in verdicts:
        return False
    return None if None in verdicts else True
