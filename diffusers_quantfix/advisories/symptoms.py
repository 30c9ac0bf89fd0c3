"""Which known defect shows as this text?  A search over the declarations of the fixes; no library is imported.

A defect is found by its message (`Fix.patterns`), or, where it raises none, by the words of its symptom.  Several
defects share a message: the frames of the traceback tell them apart (`Fix.frames`), then the versions.
"""

from __future__ import annotations

import math
import re

from ..engine.versions import contains, installed_version
from ..fixes import DISTRIBUTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..engine.fix import Fix, Target

# A traceback of a deep pipeline has 30 kB.  What is longer is a log: its end is searched, where the error stands.
LIMIT = 200_000

# What looks like one of the defects and is none of them: (pattern, sentence that says what it is and what to try).
LOOK_ALIKES: tuple[tuple[str, str], ...] = (
    (
        r"out of memory|OutOfMemoryError|DefaultCPUAllocator: (can't|not enough)",
        "the memory is full. That is a defect only where weights stay that should be gone: `qf.track(pipe)` shows "
        "what stays, `qf.release(pipe)` frees it; else use enable_model_cpu_offload(), group offloading or 4-bit "
        "weights",
    ),
    (
        r"mat1 and mat2 must have the same dtype|expected scalar type|expected m1 and m2 to have the same dtype|"
        r"must have the same dtype|"
        r"Input type \(\S+\) and (weight|bias) type \(\S+\) should be the same",
        "an input and a weight differ in dtype or device: load all components with the same torch_dtype, and pass "
        "inputs in that dtype on that device",
    ),
    (
        r"shapes cannot be multiplied|size mismatch for|must match the size of tensor|"
        r"has an expected quantized shape of|expected shape tensor\(",
        "the shapes do not fit: a checkpoint, LoRA or input is made for another model",
    ),
    (
        r"Target modules .{1,400} not found in the base model|state_dict'? should be empty at this point",
        "this LoRA names layers that the model does not have, or has a format that this diffusers cannot convert: "
        "look for one that is made for this model",
    ),
    (
        # https://github.com/huggingface/diffusers/issues/9514, 9108 and 9270; mended by optimum-quanto 0.2.5
        r"KeyError: '[\w.]*\.weight\._(data|scale|shift)[\w.]*'",
        "optimum-quanto before 0.2.5 cannot load a state dict that lacks its own weights, as a LoRA's does: "
        "`pip install -U optimum-quanto`",
    ),
    (
        r"is not supported for '?[48]-bit'? quantized models with the installed version of bitsandbytes",
        "this bitsandbytes is too old to move quantized models: `pip install -U bitsandbytes`",
    ),
    (
        r"not implemented for 'Float8_|couldn't find storage object Float8_",
        "float8 only stores weights: load the model in bfloat16, then use enable_layerwise_casting() or a "
        "quantization_config",
    ),
    (
        r"Unknown quantization type, got|create_quantized_param\(\) got an unexpected keyword",
        "this diffusers does not know that quantizer, or files of two releases lie in one folder: "
        "`python -m diffusers_quantfix doctor`, then install diffusers anew",
    ),
    (
        r"no kernel image is available|not compatible with the current PyTorch installation",
        "torch is built for other GPUs than this one: install a build for its compute capability",
    ),
    (
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available",
        "torch sees no NVIDIA GPU: `python -m diffusers_quantfix doctor` says why",
    ),
    (
        r"CUDA Setup failed|libbitsandbytes_(cuda|cpu|rocm)|has no native library|bitsandbytes library load error",
        "the native library of bitsandbytes is missing or does not fit this torch: `python -m bitsandbytes` says which "
        "one it looks for",
    ),
    (
        r"No module named|cannot import name|DLL load failed|undefined symbol",
        "a library is missing or does not fit another: `python -m diffusers_quantfix doctor` names releases that do "
        "not fit together",
    ),
    (
        r"device-side assert|illegal memory access|CUBLAS_STATUS",
        "a CUDA kernel failed, and the traceback may show a later line: run once more with CUDA_LAUNCH_BLOCKING=1",
    ),
    (
        r"GatedRepoError|RepositoryNotFoundError|LocalEntryNotFoundError|40[134] Client Error|"
        r"not a valid model identifier",
        "the checkpoint could not be downloaded: check its name, your token and the network",
    ),
)

# Texts hold release numbers as `pip freeze` and `diffusers-cli env` write them.
_STATED = re.compile(
    r"\b("
    + "|".join(DISTRIBUTIONS)
    + r")(?: version)?(?:==|: ?| )v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|rc|post)\d+)?)\b",
    re.IGNORECASE,
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception)\b")
_WORD = re.compile(r"[a-z_][a-z0-9_]{2,}|(?<!\d)\d+-?bit")
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "the and for not with that this from has are was were but does did its can cannot when after before none "
        "error runtimeerror valueerror typeerror keyerror exception traceback most recent call last file line self "
        "model models pipe pipeline python torch diffusers have get got use using",
    )
)


class Match:
    """One defect that shows as the text.

    Attributes:
        fix: its declaration.
        score: how well it fits; only its order means something.
        by_message: whether its error message stands in the text; else only words of its symptom do.
        frames: how many of `Fix.frames` the text has.
        inside: whether the versions lie in the affected range; None where they are not known.
    """

    __slots__ = ("by_message", "fix", "frames", "inside", "score")

    def __init__(self, fix: Fix, score: float, by_message: bool, frames: int, inside: bool | None) -> None:
        self.fix = fix
        self.score = score
        self.by_message = by_message
        self.frames = frames
        self.inside = inside


def plain(text: str) -> str:
    """A text as `Fix.patterns` expects it: one line, ``'`` for every quotation mark, no backticks, ``/`` in paths."""
    text = _ANSI.sub("", text[-LIMIT:]).replace("\\", "/")
    for mark in '"“”‘’´':
        text = text.replace(mark, "'")
    for frame in "`│┃╭╮╰╯─❱^~":  # rich draws a box around a traceback
        text = text.replace(frame, " " if frame != "`" else "")
    return " ".join(text.split())


def search(
    text: str,
    fixes: Iterable[Fix],
    installed: Callable[[str], str | None] = installed_version,
) -> list[Match]:
    """The defects that show as a text, the best first.

    Args:
        text: an error message, a traceback, a log that ends with one, or a description.
        fixes: the declarations to search.
        installed: gives the installed version of a distribution; one that the text states goes before it.
    """
    text = plain(text)
    fixes = list(fixes)
    words = _rarity(fixes)
    query = {word for word in _words(_message(text)) if word in words}
    unknown = sum(1 for word in _words(_message(text)) if word not in words)
    # An error message that is no known one shares words with those that are; a description is looser.
    enough = 0.8 if _ERROR.search(text) else 0.45
    versions = {name.lower(): version for name, version in _STATED.findall(text)}
    known = lambda name: versions.get(name) or installed(name)  # noqa: E731
    found = []
    for fix in fixes:
        hits = sum(1 for pattern in fix.patterns if re.search(pattern, text, re.IGNORECASE))
        shared = query & _own_words(fix)
        total = sum(words[word] for word in query) + 4.0 * unknown
        overlap = sum(words[word] for word in shared) / total if total else 0.0
        if not hits and not (overlap >= enough and len(shared) >= 3):
            continue
        seen = [frame for frame in fix.frames if re.search(_frame(frame), text, re.IGNORECASE)]
        frames = sum(1.5 if ".py:" in frame else 1.0 for frame in seen)  # a function says more than a word
        inside = _inside(fix, known)
        score = (4.0 if hits else 0.0) + min(hits, 3) / 2 + frames + 2 * overlap
        score += {True: 0.75, None: 0.0, False: -1.0}[inside]
        score += min(len(fix.upstream), 5) / 100  # often reported, often met: decides between equals
        found.append(Match(fix, score, bool(hits), len(seen), inside))
    return sorted(found, key=lambda match: (-match.score, match.fix.id))


def look_alike(text: str) -> str:
    """What a text is that looks like one of the defects, as a sentence; empty where nothing is known."""
    text = _message(plain(text))
    for pattern, sentence in LOOK_ALIKES:
        if re.search(pattern, text, re.IGNORECASE):
            return sentence
    return ""


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


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower())) - _COMMON


def _own_words(fix: Fix) -> set[str]:
    return _words(plain(f"{fix.symptom} {fix.title} {fix.id.replace('-', ' ')}"))


def _rarity(fixes: list[Fix]) -> Mapping[str, float]:
    counts: dict[str, int] = {}
    for fix in fixes:
        for word in _own_words(fix):
            counts[word] = counts.get(word, 0) + 1
    return {word: math.log(1 + len(fixes) / count) for word, count in counts.items()}
