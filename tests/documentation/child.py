"""Runs the blocks of one page in one namespace, as a reader who pastes them one after another does.

python -m tests.documentation.child FILE [--package]     # FILE: texts as JSON; prints the outcomes as JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import types
from typing import Any

SECONDS = 600  # for one block


class TooLong(BaseException):
    """A block took too long."""


def main(file: str, package: bool) -> None:
    if package:
        import diffusers_quantfix  # noqa: F401  # the first line of a user's program

    import random

    import numpy
    import torch
    from diffusers.utils import logging as diffusers_logging

    import tests.programs.devices  # noqa: F401

    torch.set_num_threads(1)
    diffusers_logging.disable_progress_bar()
    _without_network()
    _without_compiler()
    with open(file) as texts:
        blocks = json.load(texts)
    told: list[list[str]] = []
    page = types.ModuleType("__main__")
    namespace = vars(page)
    signal.signal(signal.SIGALRM, _stop)
    for text in blocks:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        before = {name: id(value) for name, value in namespace.items()}
        signal.alarm(SECONDS)
        try:
            said = _run(text, namespace)
        except TooLong:
            said = f"longer than {SECONDS} s"
        except BaseException as error:
            said = f"{type(error).__name__}: {_first_line(error)}"
        finally:
            signal.alarm(0)
        new = {name: value for name, value in namespace.items() if before.get(name) != id(value)}
        told.append([said, _digest(new)])
    print("TOLD", json.dumps(told), flush=True)
    os._exit(0)


def _first_line(error: BaseException) -> str:
    """Without the paths of this machine."""
    return re.sub(r" ?\(?/[\w./-]+/site-packages/[\w./-]+\)?", "", str(error).strip().partition("\n")[0])[
        :200
    ]


def _run(text: str, namespace: dict[str, Any]) -> str:
    """Run a block; "ok", or "ok, given ..." with the names that the page forgot to import or calls differently."""
    given: list[str] = []
    while True:
        try:
            exec(compile(text, "block", "exec"), namespace)
        except NameError as error:
            if error.name in given or len(given) == 5 or not _give(error.name, namespace):
                raise
            given.append(error.name)
        else:
            return f"ok, given {', '.join(given)}" if given else "ok"


def _give(name: str, namespace: dict[str, Any]) -> bool:
    """Define a name that a reader would define without asking."""
    import diffusers
    import torch
    import transformers

    others = {"pipe": "pipeline", "pipeline": "pipe", "model": "model_8bit", "max_rank": ""}
    for library in (diffusers, transformers):
        if hasattr(library, name):
            namespace[name] = getattr(library, name)
            return True
    if name == "torch":
        namespace[name] = torch
    elif name == "dtype":
        namespace[name] = torch.bfloat16
    elif name == "max_rank":
        namespace[name] = 8
    elif others.get(name) in namespace:
        namespace[name] = namespace[others[name]]
    return name in namespace


def _stop(*_: Any) -> None:
    raise TooLong


def _without_network() -> None:
    """`load_image` of a URL gives a picture made here, and films are not encoded."""
    import diffusers.utils
    from diffusers.utils import loading_utils

    from tests.pipelines.inputs import image

    original = loading_utils.load_image

    def load_image(given: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            image()
            if isinstance(given, str) and given.startswith("http")
            else original(given, *args, **kwargs)
        )

    diffusers.utils.load_image = loading_utils.load_image = load_image
    diffusers.utils.export_to_video = lambda *args, **kwargs: None


def _without_compiler() -> None:
    """torch.compile traces and runs eagerly: Triton has no kernels for the rig's devices."""
    import torch

    original = torch.compile

    def compile(model: Any = None, *, fullgraph: bool = False, dynamic: Any = None, **_: Any) -> Any:
        return original(model, fullgraph=fullgraph, dynamic=dynamic, backend="eager")

    torch.compile = compile


def _digest(values: dict[str, Any]) -> str:
    """Of the tensors and pictures that a block has made, in order; empty without any."""
    found = hashlib.sha256()
    any_ = False
    for name in sorted(values):
        for part in _bytes(values[name]):
            found.update(part)
            any_ = True
    return found.hexdigest()[:12] if any_ else ""


def _bytes(value: Any, depth: int = 0) -> Any:
    import numpy
    import torch
    from PIL import Image

    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        yield value.detach().float().cpu().numpy().tobytes()
    elif isinstance(value, (numpy.ndarray, Image.Image)):
        yield value.tobytes()
    elif isinstance(value, (list, tuple)) and depth < 3:
        for one in value:
            yield from _bytes(one, depth + 1)


if __name__ == "__main__":
    main(sys.argv[1], "--package" in sys.argv)
