"""Which known bug does this text show?  A search over the fixes' declarations; no library is imported.

A bug is found by its message (`Fix.patterns`), by a link to its upstream issue, by a frame that only it has, or, if the
text has none of these, by the terms of its description.  Several bugs share a message: the frames of the traceback tell
them apart (`Fix.frames`), then what the text is about, then the versions.
"""

from __future__ import annotations

import functools
import math
import re

from ..engine.versions import contains, installed_version
from ..fixes import DISTRIBUTIONS
from . import look_alikes
from .vocabulary import ACTIONS, BACKENDS, PLACES, TROUBLES, terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..engine.fix import Fix, Target

# A deep pipeline's traceback has 30 kB.  A longer text is a log: only its end is searched, where the error is.
LIMIT = 200_000

# Texts contain versions as `pip freeze`, `pip list`, `pip show` and `diffusers-cli env` print them.
_STATED = re.compile(
    r"\b("
    + "|".join(["pytorch", *DISTRIBUTIONS])
    + r")(?: version)?(?: \(GPU\?\))?(?:==|@| version: |: ?| Version: | |-)v?"
    r"(\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|rc|post)\d+)?)(?![\d.]*[%\w])",
    re.IGNORECASE,
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Not a word of any message; patterns would take time quadratic in its length.
_LONG = re.compile(r"([!-~]{500})[!-~]+")
_ESCAPE = re.compile(r"\\([_*`\[\]()#-])")  # of Markdown
_EXCEPTION = re.compile(r"\b([A-Z]\w*(?:Error|Exception))\b")
_FRAME = re.compile(r"File '[^']{1,500}', line \d+|\.py:\d+,? in |\.py', line \d+")
_LINK = re.compile(r"(?<![\w.-])([\w.-]{1,40}/[\w.-]{1,100})(?:/(?:issues|pull)/|#)(\d{1,9})\b")
_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_CODE_LINE = re.compile(
    r"\s*(?:>>>|from \w|import \w|[\w.\[\]'\"]+ ?=[^=]|[\w.]+\($|[)\]}]+,?$|\w+=.*,$|\d+%\|)|.*\d+%\|"
)
# A known bug of another backend, or one that needs what the text does not mention, is less likely.
_OTHER_BACKEND, _OTHER_ACTION, _NO_BACKEND = -2.0, -0.8, -0.5
_ADAPTERS = frozenset({"dora", "lokr", "loha", "oft", "vera"})
_QUANTIZED = BACKENDS | {"quantiz"}
_NARROW_PLACES = frozenset({"group", "sequential", "disk", "devicemap"})
_ALIKE = 0.33  # of 1: a description that shares less with a bug is not about it
_SAME = 0.8  # ... and one that does not mention quantization or offloading must match this well
_EVIDENCE = 0.15  # for each of its functions or arguments that the text names
# A message of so many bugs says little: a description of so many words beside it decides.
_MANY, _WORDS = 5, 40


class Match:
    """One bug that the text may show.

    Attributes:
        fix: its declaration.
        score: how well it fits; only its order means something.
        by_message: whether the text contains its error message, a link to it or a frame that only it has; otherwise
            only terms of its description matched.
        by_frame: whether only such a frame was found.
        elsewhere: whether the text contains its message, below a traceback that has none of its frames.
        frames: how many of `Fix.frames` the text has.
        inside: whether the versions are in the affected range; None if they are not known.
        unfit: whether the text names nothing of what the bug needs: quantization, what the program does, or the kind
            of offloading.
    """

    __slots__ = ("by_frame", "by_message", "elsewhere", "fix", "frames", "inside", "score", "unfit")

    def __init__(self, fix: Fix, score: float, by_message: bool, frames: int, inside: bool | None) -> None:
        self.fix = fix
        self.score = score
        self.by_message = by_message
        self.by_frame = False
        self.elsewhere = False
        self.unfit = False
        self.frames = frames
        self.inside = inside


def plain(text: str) -> str:
    """A text as `Fix.patterns` expects it: one line, ``'`` for every quotation mark, no backticks, ``/`` in paths."""
    text = _LONG.sub(r"\1", _ANSI.sub("", text[-LIMIT:]))
    if "&" in text:
        import html

        text = html.unescape(text)
    text = _ESCAPE.sub(r"\1", text).replace("\\", "/")
    for mark in '"“”‘’´':
        text = text.replace(mark, "'")
    for frame in "`│┃╭╮╰╯─❱^~":  # rich draws a box around a traceback
        text = text.replace(frame, " " if frame != "`" else "")
    return " ".join(text.split())


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
    """The bugs that a text may show, best match first.

    Args:
        text: an error message, a traceback, a log that ends with one, or a description.
        fixes: the declarations to search.
        installed: returns the installed version of a distribution; versions stated in the text take precedence.
    """
    fixes = list(fixes)
    search_ = _Search(text, fixes, installed)
    found = [match for fix in fixes if (match := search_.match(fix))]
    if not any(match.by_message for match in found):
        # Terminals wrap lines inside words.
        joined = _Search(text.replace("\n", ""), fixes, installed) if "\n" in text.strip() else None
        again = [match for fix in fixes if joined and (match := joined.match(fix, described=False))]
        found = again or found
    if sum(match.by_message for match in found) >= _MANY and len(search_.text.split()) >= _WORDS:
        found = [match for match in found if not (match.by_message and match.unfit)]
    if any(match.by_message and not match.by_frame for match in found):
        found = [match for match in found if not match.by_frame]
    return sorted(found, key=lambda match: (-match.by_message, -match.score, match.fix.id))


def look_alike(text: str) -> str:
    """What a text that looks like one of the bugs really is, as a sentence; empty if unknown."""
    return look_alikes.look_alike(_message(plain(text)))


def first_sentence(symptom: str) -> str:
    """The part of a symptom that says what users see; the rest says where, and what else."""
    return re.split(r"(?<!\.)\. (?=[A-Z])", symptom)[0]


class _Search:
    """One text, prepared once for all fixes."""

    def __init__(self, text: str, fixes: list[Fix], installed: Callable[[str], str | None]) -> None:
        self.text = plain(text)
        self.low = self.text.lower()
        versions = stated_versions(text)
        self.known = lambda name: versions.get(name) or installed(name)
        self.exceptions = set(_EXCEPTION.findall(self.text))
        self.frames = len(_FRAME.findall(self.text))
        self.in_field = look_alikes.FIELD.search(self.text) is not None
        self.links = {f"{repository}/{number}".lower() for repository, number in _LINK.findall(self.text)}
        # A telling frame: one that few fixes have.
        self.sharing: dict[str, int] = {}
        for fix in fixes:
            for frame in fix.frames:
                self.sharing[frame] = self.sharing.get(frame, 0) + 1
        self.descriptions = {fix.id: _descriptions(fix.id, fix.title, fix.symptom, fix.harm) for fix in fixes}
        self.own = {fix_id: set().union(*parts) for fix_id, parts in self.descriptions.items()}
        counts: dict[str, int] = {}
        for own in self.own.values():
            for term in own:
                counts[term] = counts.get(term, 0) + 1
        self.weight = {term: math.log(1 + len(fixes) / count) for term, count in counts.items()}
        prose = _prose(text)
        self.all = terms(self.text) | ({"fails"} if self.exceptions else set())
        self.readings = [
            reading
            for part in (prose, prose.partition("\n")[0])
            if (reading := self._reading(terms(plain(part))))
        ]

    def match(self, fix: Fix, described: bool = True) -> Match | None:
        """How a fix matches; None if it does not."""
        matched = [
            hit.group() for pattern in fix.patterns if (hit := re.search(pattern, self.text, re.IGNORECASE))
        ]
        hits = sum(1 for message in matched if look_alikes.stands_alone(message, self.text))
        seen = [frame for frame in fix.frames if re.search(_frame(frame), self.text, re.IGNORECASE)]
        linked = bool(self.links) and any(
            f"{repository}/{number}".lower() in self.links
            for link in fix.upstream
            for repository, number in _LINK.findall(link)
        )
        telling = self._tells(fix, seen) if not hits else False
        unsure = False
        if hits and not seen and not any(map(look_alikes.FIELD.search, matched)):
            # A general message from code that the fix does not concern.
            unsure = self.in_field and self.frames >= 3
            hits = hits if self.in_field or not self.frames else 0
        by_message = bool((hits and not unsure) or linked or telling)
        if by_message or hits:
            alike = max(
                (
                    self._alike(*reading, own)
                    for reading in self.readings
                    for own in self.descriptions[fix.id]
                ),
                default=0.0,
            )
        else:
            alike = self._describes(fix, seen) if described and not matched else 0.0
            if not alike:
                return None
        # A function says more than a word, and a word that many fixes share says little.
        frames = sum(1.5 if ".py:" in frame else 1.0 if self.sharing[frame] <= 4 else 0.6 for frame in seen)
        inside = _inside(fix, self.known)
        score = (
            (4.0 if hits else 0.0) + min(hits, 3) / 2 + (5.0 if linked else 0.0) + (3.0 if telling else 0.0)
        )
        said = terms(" ".join(matched)) if matched else set()
        score += frames + 2 * alike + self._misfit(fix, said, seen)
        score += {True: 0.75, None: 0.0, False: -1.0}[inside]
        score += min(len(fix.upstream), 5) / 20  # often reported means common: decides between equals
        match = Match(fix, score, by_message, len(seen), inside)
        match.by_frame = telling and not linked
        match.elsewhere = unsure and not linked
        match.unfit = not linked and len(seen) < 2 and self._is_unfit(fix, said)
        return match

    def _reading(self, found: set[str]) -> tuple[set[str], float]:
        """The terms that some fix has, and the weight of all terms: unknown ones count, but cannot drown the others."""
        known = {term for term in found if term in self.weight}
        unknown = min(len(found) - len(known), 4)
        return known, sum(self.weight[term] for term in known) + 1.5 * unknown

    def _alike(self, known: set[str], weight: float, own: set[str]) -> float:
        """How similar a description in the text is to one of a fix, from 0 to 1."""
        shared = sum(self.weight[term] for term in known & own)
        return shared / math.sqrt(weight * sum(self.weight[term] for term in own)) if shared else 0.0

    def _describes(self, fix: Fix, seen: list[str]) -> float:
        """How well a text without a known message describes this bug; 0 if it is about something else."""
        enough = _ALIKE
        if not self.all & (_QUANTIZED if self.own[fix.id] & _QUANTIZED else _QUANTIZED | PLACES):
            enough = _SAME
        evidence = 1.0 + _EVIDENCE * min(len(seen), 3)
        best = 0.0
        for own in self.descriptions[fix.id]:
            if self._is_other_backend(own):
                continue
            for known, weight in self.readings:
                shared = known & own
                if known & BACKENDS and "quantiz" in own:
                    shared = shared | {"quantiz"}  # "8-bit" says it, too
                if any(own & kind and not own & kind & self.all for kind in (TROUBLES, ACTIONS)):
                    continue
                alike = self._alike(known, weight, own) * evidence
                if own & _NARROW_PLACES and not shared & _NARROW_PLACES:
                    alike *= 0.8
                if len(shared) >= 3 or alike >= 2 * _ALIKE:
                    best = max(best, alike)
        # An unknown error message shares words with known ones; descriptions vary more.
        return best if best >= (max(enough, 1.6 * _ALIKE) if self.exceptions else enough) else 0.0

    def _is_other_backend(self, own: set[str]) -> bool:
        named, needed = self.all & BACKENDS, own & BACKENDS
        others = {"quanto", "torchao", "gguf"}
        if named & others and "bitsandbytes" not in named:
            named &= others  # "int8" of torchao is not that of bitsandbytes
        if not named or not needed:
            return False
        bits = {"4bit", "8bit"}
        if named & bits and needed & bits and not named & needed & bits:
            return True
        bitsandbytes = {"bitsandbytes", *bits}
        return not (named & needed or (named & bitsandbytes and needed & bitsandbytes))

    def _misfit(self, fix: Fix, said: set[str], seen: list[str]) -> float:
        """How much of what the bug needs the text does not mention: by its title, or by the whole sentence.

        Args:
            said: the terms of the bug's message, which say nothing about what the program did.
            seen: the bug's frames in the text: a traceback under sequential offload does not say so.
        """
        unsaid = {"sequential"} if any(".py" in frame for frame in seen) else set()
        score = max(
            (_OTHER_BACKEND if self._is_other_backend(own) else 0.0)
            + (_OTHER_ACTION if self._lacks(own - unsaid, said) else 0.0)
            + (_NO_BACKEND if own & BACKENDS and not self.all & _QUANTIZED else 0.0)
            for own in self.descriptions[fix.id][:2]
        )
        return score + (_OTHER_ACTION if self.all & _ADAPTERS - self.own[fix.id] else 0.0)

    def _lacks(self, own: set[str], said: set[str]) -> bool:
        """Whether the text names no action, or no place of the weights, of those that a description needs."""
        return any(
            needed and not needed & self.all for needed in (own & ACTIONS - said, own & _NARROW_PLACES - said)
        )

    def _is_unfit(self, fix: Fix, said: set[str]) -> bool:
        return all(
            (own & BACKENDS and not self.all & _QUANTIZED) or self._lacks(own, said)
            for own in self.descriptions[fix.id][:2]
        )

    def _tells(self, fix: Fix, seen: list[str]) -> bool:
        """Whether a truncated traceback has a frame of few fixes, and ends with this one's exception."""
        known = set(_EXCEPTION.findall(f"{fix.symptom} {' '.join(fix.patterns)}"))
        return bool(known & self.exceptions) and any(
            ".py" in part and re.search(_frame(part), self.text, re.IGNORECASE)
            for frame in seen
            if self.sharing[frame] <= 2
            for part in (frame.split("|") if "(" not in frame else (frame,))
        )


def _prose(text: str) -> str:
    """A description without its code, its traceback and its progress bars; at most 100 words."""
    text = _CODE.sub("\n", text[:20_000])
    lines = [line for line in text.splitlines() if line.strip() and not _CODE_LINE.match(line)]
    lines = [line for line in lines if not re.match(r"\s*File |\s{4,}", line)]
    words, kept = 0, []
    for line in lines:
        words += len(line.split())
        kept.append(line)
        if words > 100:
            break
    return "\n".join(kept)


def _message(text: str) -> str:
    """The part of a text after the last frame of its traceback."""
    last = 0
    for frame in re.finditer(r"File '[^']{1,500}', line \d+, in \S+", text):
        last = frame.start()
    return text[last:]


def _frame(frame: str) -> str:
    """The pattern of ``file.py:function`` in a traceback of Python, of Jupyter or of rich; others as they are."""
    file, colon, function = frame.partition(".py:")
    if not colon:
        return frame
    return rf"{re.escape(file)}\.py\b.{{0,24}}? in ([\w<>]+\.)*{function}\b"


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


@functools.cache
def _descriptions(fix_id: str, title: str, symptom: str, harm: str) -> list[set[str]]:
    """The terms of each way in which a fix says what happens: its title, and the first sentence of its symptom."""
    name = terms(fix_id.replace("-", " ").replace("bnb", "bitsandbytes")) & (BACKENDS | PLACES)
    if harm == "error":
        name.add("fails")
    first = first_sentence(symptom)
    # A semicolon in quotation marks is part of a message.
    parts = re.split(r'; (?=[^"]*(?:"[^"]*"[^"]*)*$)', first)
    return [name | terms(plain(part)) for part in (title, first, *parts)]
