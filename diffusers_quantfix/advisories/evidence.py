"""What in a text speaks for a bug, and what for none of them: numbers, weighted in ``asked.json``.

They compare the text with every declaration, and with what people asked before: see `catalogue`.
"""

from __future__ import annotations

import math
import re

from . import look_alikes
from .catalogue import Catalogue, frame_pattern, names_of_code, similarity
from .texts import EXCEPTION, FRAME, LINK, joined, plain, prose
from .vocabulary import ACTIONS, BACKENDS, PLACES, TROUBLES, terms, translated

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# For one bug.
EVIDENCE = (
    "message",  # its message, complete enough to stand alone
    "rarity",  # ... and how few bugs share it
    "refused",  # its message, but not what has to stand beside it
    "unsure",  # its message, in a traceback of other code
    "frames",  # what `Fix.frames` lists
    "telling",  # a frame of few bugs above this one's kind of exception
    "described",  # how similar the text is to its title or symptom
    "told",  # ... and to all that is written about it
    "names",  # names of code that its declaration has, too
    "asked",  # how similar the text is to others about this bug
    "backend",
    "other backend",
    "no backend",
    "place",
    "no place",
    "other place",
    "action",
    "other action",
    "trouble",
    "reported",  # often reported upstream means common
    "other error",
    "library",  # the text names the library of the bug
    "other library",
)
# For none of them; each counts once for a text.
NONE = (
    "look-alike",
    "own loaders",
    "own trainers",
    "field",
    "error",
    "traceback",
    "quantized",
    "offloaded",
    "no message",
    "length",
    "asked elsewhere",  # how similar the text is to others that are about no bug of ours
    "language model",
    "user interface",
    "picture",
    "libraries",
    "always",
)

_FEW = 6  # terms
_END = 20_000  # of a log, whose words are read; messages and frames are searched in all of it
_QUANTIZED = BACKENDS | {"quantiz"}
_BITS = frozenset({"4bit", "8bit"})
_BITSANDBYTES = _BITS | {"bitsandbytes"}
_LANGUAGE_MODEL = re.compile(
    r"llama|\bqwen(?!.?image)|mistral|\bglm|chatglm|vicuna|alpaca|baichuan|causal.?lm|\bllm|\bchat\b|\bsft\b|\btrl/|vllm|"
    r"bloom|falcon|gptq|\bawq|qlora",
    re.IGNORECASE,
)
_PICTURE = re.compile(
    r"diffus|flux|\bsd[x3]|stable.?diff|wan ?2|hunyuan|pipe\b|pipeline|image|vae|picture|unet|video",
    re.IGNORECASE,
)
_USER_INTERFACE = re.compile(
    r"comfy|ksampler|custom_nodes|workflow|\bnode|webui|forge|a1111|invoke|krita|kohya|sd-scripts|trainer\b",
    re.IGNORECASE,
)
_LIBRARIES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"diffusers|Pipeline\b|from_pipe|load_lora_weights|enable_\w*offload",
        r"transformers|AutoModel|text.?encoder",
        r"accelerate|AlignDevicesHook|cpu_offload|device_map",
        r"bitsandbytes|\bbnb|Params4bit|Linear8bit|Linear4bit|load_in_[48]bit|nf4",
        r"\bpeft|tuners/|\blora|\bdora|lokr",
        r"quanto|qint\d|qfloat8|QBytes|QBits",
        r"torchao|quantize_\(",
        r"gguf",
    )
)

# The top package of a library -> how texts name it.
_PACKAGES = {
    package: re.compile(pattern, re.IGNORECASE)
    for package, pattern in {
        "diffusers": "diffusers",
        "transformers": "transformers|AutoModel",
        "accelerate": "accelerate",
        "bitsandbytes": r"bitsandbytes|\bbnb",
        "peft": r"\bpeft\b|tuners/",
        "optimum": "quanto",
        "torchao": "torchao",
        "gguf": "gguf",
    }.items()
}


class Text:
    """A text, prepared once for all bugs."""

    def __init__(self, text: str) -> None:
        self.plain = plain(text)
        self.joined = plain(joined(text)) if "\n" in text.strip() else ""
        self.exceptions = set(EXCEPTION.findall(self.plain))
        self.frames = len(FRAME.findall(self.plain))
        self.in_field = look_alikes.FIELD.search(self.plain) is not None
        self.links = {f"{repository}/{number}".lower() for repository, number in LINK.findall(self.plain)}
        end = self.plain[-_END:]
        self.terms = terms(translated(end))
        said = prose(text)
        self.readings = [
            found for part in (said, said.partition("\n")[0]) if (found := terms(translated(plain(part))))
        ]
        self.kinds = self.terms | ({"fails"} if self.exceptions else set())
        self.names = names_of_code(end)
        self.packages = {package for package, pattern in _PACKAGES.items() if pattern.search(self.plain)}
        # As "Segmentation fault (core dumped)": any program may say it.
        self.is_general = len(self.terms) < _FEW and not (
            self.in_field or self.packages or self.terms & (_QUANTIZED | PLACES | ACTIONS)
        )


class Finding:
    """The evidence for one bug; `numbers` in the order of `EVIDENCE`."""

    __slots__ = ("frames", "linked", "message", "numbers", "telling", "unsure")

    def __init__(self) -> None:
        self.numbers: list[float] = []
        self.message = self.unsure = self.linked = self.telling = False
        self.frames = 0

    @property
    def by_message(self) -> bool:
        return self.message or self.linked or self.telling


def findings(text: Text, known: Catalogue, asked: Mapping[str, float]) -> list[Finding]:
    """The evidence for each bug of a catalogue, in its order.

    Args:
        text: what somebody asks.
        known: the declarations.
        asked: how similar the text is to earlier ones, from `Asked.alike`.
    """
    messages = _messages(text.plain, known)
    if text.joined and not any(messages):  # terminals wrap lines inside words
        messages = _messages(text.joined, known)
    alone = [[one for one in found if look_alikes.stands_alone(one, text.plain)] for found in messages]
    rarity = 1 / (1 + math.log(max(1, sum(map(bool, alone)))))
    scale = math.sqrt(10 * max(1.0, known.by_name.total(text.names)))
    by_own = [known.by_own.sized(one) for one in text.readings]
    by_told = [known.by_told.sized(one) for one in (*text.readings, text.terms)]
    found = []
    for number, fix in enumerate(known.fixes):
        one = Finding()
        seen = [frame for frame, pattern in known.frames[number] if pattern.search(text.plain)]
        one.frames = len(seen)
        one.linked = bool(text.links & known.links[number])
        hit = bool(alone[number])
        # A general message from code that the fix does not concern.
        general = hit and not seen and not any(map(look_alikes.FIELD.search, messages[number]))
        one.unsure = general and (text.frames >= 3 if text.in_field else text.frames > 0)
        one.message = hit and not one.unsure
        one.telling = _tells(text, known, number, seen)
        own, first = known.own[number], known.descriptions[number][:2]
        needed = set().union(*first)
        packages = {target.module.partition(".")[0] for target in fix.targets}
        places, actions = text.kinds & PLACES, text.kinds & ACTIONS
        one.numbers = [
            float(one.message),
            rarity if hit else 0.0,
            float(bool(messages[number]) and not hit),
            float(one.unsure),
            # A function says more than a word, and a word that many bugs share says little.
            sum(1.5 if ".py:" in frame else 1.0 if known.sharing[frame] <= 4 else 0.6 for frame in seen),
            float(one.telling),
            max(
                [similarity(known.by_own, said, part) for said in by_own for part in known.sized[number]],
                default=0.0,
            ),
            max([similarity(known.by_told, said, known.told_sized[number]) for said in by_told]),
            known.by_name.total(text.names & known.names[number]) / scale,
            asked.get(fix.id, 0.0),
            float(bool(text.kinds & BACKENDS & own)),
            float(_is_other_backend(text.kinds & BACKENDS, own & BACKENDS)),
            float(bool(own & BACKENDS) and not text.kinds & _QUANTIZED),
            float(bool(places & needed)),
            float(bool(first[0] & PLACES) and not places & needed),
            float(bool(places - own)),
            float(bool(actions & needed)),
            float(bool(actions - own)),
            float(bool(text.kinds & TROUBLES & own)),
            known.reported[number],
            float(
                fix.harm == "error"
                and bool(text.exceptions)
                and not text.exceptions & known.exceptions[number]
            ),
            float(bool(text.packages & packages)),
            float(bool(text.packages) and not text.packages & packages),
        ]
        found.append(one)
    return found


def against(text: Text, asked: Mapping[str, float], any_message: bool) -> list[float]:
    """The evidence for none of the bugs, in the order of `NONE`."""
    pictures = _PICTURE.search(text.plain) is not None
    return [
        float(bool(look_alikes.look_alike(message(text.plain)))),
        float(re.search(look_alikes.OWN_LOADERS, text.plain, re.IGNORECASE) is not None),
        float(re.search(look_alikes.OWN_TRAINERS, text.plain, re.IGNORECASE) is not None),
        float(text.in_field),
        float(bool(text.exceptions)),
        float(text.frames >= 3),
        float(bool(text.kinds & _QUANTIZED)),
        float(bool(text.kinds & PLACES)),
        float(not any_message),
        math.log(1 + len(text.plain.split())),
        asked.get("", 0.0),
        float(not pictures and _LANGUAGE_MODEL.search(text.plain) is not None),
        float(_USER_INTERFACE.search(text.plain) is not None),
        float(pictures),
        float(sum(pattern.search(text.plain) is not None for pattern in _LIBRARIES)),
        1.0,
    ]


def message(text: str) -> str:
    """The part of a text after the last frame of its traceback."""
    last = 0
    for frame in re.finditer(r"File '[^']{1,500}', line \d+, in \S+", text):
        last = frame.start()
    return text[last:]


def _messages(text: str, known: Catalogue) -> list[list[str]]:
    return [
        [hit.group() for pattern in patterns if (hit := pattern.search(text))] for patterns in known.patterns
    ]


def _tells(text: Text, known: Catalogue, number: int, seen: list[str]) -> bool:
    """Whether a truncated traceback has a frame of few bugs, and ends with this one's exception."""
    return bool(known.exceptions[number] & text.exceptions) and any(
        ".py" in part and frame_pattern(part).search(text.plain)
        for frame in seen
        if known.sharing[frame] <= 2
        for part in (frame.split("|") if "(" not in frame else (frame,))
    )


def _is_other_backend(named: set[str], needed: set[str]) -> bool:
    others = named & {"quanto", "torchao", "gguf"}
    if others and "bitsandbytes" not in named:
        named = others  # "int8" of torchao is not that of bitsandbytes
    if not named or not needed:
        return False
    if named & _BITS and needed & _BITS and not named & needed & _BITS:
        return True
    return not (named & needed or (named & _BITSANDBYTES and needed & _BITSANDBYTES))
