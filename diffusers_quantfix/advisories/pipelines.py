"""Which diffusers pipelines were run quantized, with which backends and placements, and with what result.

The data, `pipelines.json`, is packed from the results of ``tests/pipelines``: each distinct row of outcomes is stored
once. It is read by `explain` alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

FILE = Path(__file__).with_name("pipelines.json")
# The signs of a row of outcomes; a space: not run.
EXACT, UPSTREAM, WRONG = "=", "u", "x"

# Backend of the tests -> what people call it, in the order of the columns.
BACKENDS = {
    "bnb-nf4": "bnb-4bit",
    "bnb-int8": "bnb-8bit",
    "gguf": "gguf",
    "quanto-int8": "quanto",
    "torchao-int8": "torchao",
}
# Placement of the tests -> how a program asks for it.
PLACEMENTS = {
    "to": "on a GPU",
    "there and back": "moved to the CPU and back",
    "to the other": "moved to another GPU",
    "model offload": "model offload",
    "model offload, then off": "model offload, switched off again",
    "sequential": "sequential offload",
    "sequential, then off": "sequential offload, switched off again",
    "group, leaf": "group offload by leaf",
    "group, leaf, stream": "group offload by leaf on a stream",
    "group, leaf, stream, low memory": "group offload by leaf on a stream with low_cpu_mem_usage",
    "group, block": "group offload by block",
    "group, block, stream": "group offload by block on a stream",
    "device map": "device_map",
    "interrupted": "a run after an interrupted one",
    "saved under offload": "save_pretrained under offload",
    "LoRA": "LoRA",
    "LoRA, model offload": "LoRA under model offload",
    "compiled, model offload": "torch.compile under model offload",
    "compiled, group, leaf": "torch.compile under group offload by leaf",
    "compiled, group, leaf, stream": "torch.compile under group offload by leaf on a stream",
    "compiled, group, block": "torch.compile under group offload by block",
    "components manager, auto offload": "auto offload of a ComponentsManager",
    "load_components": "load_components",
}
# Placements that are shown together.
TOGETHER = {
    "on a GPU, moved away and back": ("to", "there and back", "to the other"),
    "model offload": ("model offload",),
    "sequential offload": ("sequential",),
    "offload switched off again": ("model offload, then off", "sequential, then off"),
    "group offload by leaf": ("group, leaf",),
    "group offload by leaf, stream": ("group, leaf, stream", "group, leaf, stream, low memory"),
    "group offload by block": ("group, block",),
    "group offload by block, stream": ("group, block, stream",),
    "device_map": ("device map",),
    "a run after an interrupted one": ("interrupted",),
    "save_pretrained under offload": ("saved under offload",),
    "LoRA": ("LoRA",),
    "LoRA under model offload": ("LoRA, model offload",),
    "torch.compile under offload": (
        "compiled, model offload",
        "compiled, group, leaf",
        "compiled, group, leaf, stream",
        "compiled, group, block",
    ),
    "auto offload (ComponentsManager)": ("components manager, auto offload",),
    "load_components": ("load_components",),
}
# Common ways to write the beginning of a class name.
_SHORT = {
    "sd": "stablediffusion",
    "sd3": "stablediffusion3",
    "sdxl": "stablediffusionxl",
    "svd": "stablevideodiffusion",
    "ltxv": "ltx",
    "pixart": "pixartalpha",
}
_FILLERS = re.compile(r"\b(?:pipelines?|pipe|the|diffusers|model|dev|schnell|pro|image|video)\b")
_FIXED_FILLERS = re.compile(r"\b(?:pipelines?|pipe|the|diffusers)\b")
_LONGEST = 60  # characters: anything longer is a description of a bug


class Outcome:
    """The result for one placement of a pipeline with one backend.

    Attributes:
        backend: a key of `BACKENDS`.
        placement: a key of `PLACEMENTS`.
        sign: `EXACT` (bit for bit the output of the same quantized pipeline on one device, nothing left behind),
            `UPSTREAM` (the un-quantized pipeline fails the same way) or `WRONG`.
        reason: the error, empty for `EXACT`.
    """

    __slots__ = ("backend", "placement", "reason", "sign")

    def __init__(self, backend: str, placement: str, sign: str, reason: str) -> None:
        self.backend, self.placement, self.sign, self.reason = backend, placement, sign, reason


class Tested:
    """The results for one pipeline on one release of diffusers.

    Attributes:
        name: the class of the pipeline.
        release: of diffusers.
        lacking: whether the installed diffusers was tested, and does not have this one.
        versions: distribution -> its version in that run.
        outcomes: one for each backend and placement that was run; empty where no tiny instance could be built.
        not_built: why, as a sentence; else empty.
        not_run: the backends with which it was not run there.
    """

    __slots__ = ("lacking", "name", "not_built", "not_run", "outcomes", "release", "versions")

    def __init__(
        self, name: str, versions: dict[str, str], outcomes: list[Outcome], not_built: str, not_run: list[str]
    ) -> None:
        self.name, self.release, self.versions = name, versions["diffusers"], versions
        self.outcomes, self.not_built, self.not_run = outcomes, not_built, not_run
        self.lacking = False


def read() -> dict[str, Any]:
    """The packed data: see ``tests/pipelines/packed.py`` for its keys."""
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return data


def names(data: dict[str, Any]) -> list[str]:
    """The pipeline classes with results."""
    return sorted({*data["pipelines"], *(name for one in data["not_built"] for name in one)})


def may_name(words: str) -> bool:
    """Whether words are short enough for a name, so that the data is not read for longer texts."""
    return len(words) <= _LONGEST and "\n" not in words


def find(words: str, data: dict[str, Any]) -> str:
    """The class that a name means: ``FluxPipeline``, ``diffusers.FluxPipeline``, "flux pipeline", "sdxl".

    Empty where the words are not the name of a pipeline alone: they may be a description of a bug.
    """
    known = {_key(name): name for name in names(data)}
    spaced = re.sub(r"[^0-9a-z]+", " ", re.sub(r"^diffusers\.", "", words.strip()).lower())
    for fillers in (_FIXED_FILLERS, _FILLERS):
        key = "".join(fillers.sub(" ", spaced).split())
        # Releases of weights share the class of their family: Wan 2.2, FLUX.1, stable diffusion 1.5
        family = re.sub(r"\d+$", "", key)
        for one in (key, key.removesuffix("pipeline"), family, f"{key}modular", f"{family}modular"):
            if name := known.get(_SHORT.get(one, one)):
                return name
    return ""


def relatives(name: str, data: dict[str, Any]) -> list[str]:
    """The variants of a pipeline: those whose names start with its name, shortest first."""
    start = re.sub(r"(Modular)?Pipeline$", "", name)
    found = [one for one in names(data) if one != name and re.match(rf"{re.escape(start)}[A-Z]", one)]
    return sorted(found, key=lambda one: (len(one), one))


def tested(name: str, data: dict[str, Any], installed: str | None) -> Tested:
    """The results for a pipeline on the installed diffusers, or on the nearest release that has it.

    Args:
        name: a class, of `names`.
        data: of `read`.
        installed: the version of diffusers; None for the newest that was tested.
    """
    having = [
        number
        for number, row in enumerate(data["pipelines"].get(name) or [None] * len(data["releases"]))
        if row is not None or name in data["not_built"][number]
    ]
    found = _tested(name, data, _nearest(having, data, installed))
    tested_releases = [one["versions"]["diffusers"] for one in data["releases"]]
    found.lacking = found.release != installed and installed in tested_releases
    return found


def _tested(name: str, data: dict[str, Any], number: int) -> Tested:
    release = data["releases"][number]
    row = data["pipelines"].get(name, [None] * len(data["releases"]))[number]
    not_built = data["not_built"][number].get(name, "")
    if row is None:
        return Tested(name, release["versions"], [], not_built, release["backends"])
    outcomes, not_run = [], []
    for backend, index in zip(release["backends"], row, strict=True):
        if index < 0:
            not_run.append(backend)
        else:
            outcomes += list(_unpacked(backend, index, data))
    return Tested(name, release["versions"], outcomes, not_built, not_run)


def _unpacked(backend: str, index: int, data: dict[str, Any]) -> Iterator[Outcome]:
    signs, reasons = data["outcomes"][index]
    left = iter(reasons)
    for placement, sign in zip(data["placements"], signs, strict=False):
        if sign != " ":
            reason = "" if sign == EXACT else data["reasons"][next(left)]
            yield Outcome(backend, placement, sign, reason)


def _nearest(numbers: list[int], data: dict[str, Any], installed: str | None) -> int:
    """Of releases sorted newest first: the newest that is not newer than the installed one, else the oldest."""
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(installed or "")
    except InvalidVersion:
        return numbers[0]
    older = [one for one in numbers if Version(data["releases"][one]["versions"]["diffusers"]) <= version]
    return (older or numbers[-1:])[0]


def _key(name: str) -> str:
    return re.sub(r"[^0-9a-z]", "", name.lower().removesuffix("pipeline"))
