"""A process that asks every probe in the states in which a program may import a library, each in a forked child.

Prints one JSON object: for each state, the answer of each target's probe, and the kinds of process-wide state that are
different afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from diffusers_quantfix.engine.errors import TargetMissing, Undecided
from diffusers_quantfix.fixes.targets import TARGETS, fix_module
from diffusers_quantfix.surroundings import usual
from tests.imports.state import everything

NEEDED = ("accelerate.big_modeling", "peft", "optimum.quanto.tensor.weights.marlin")


@contextlib.contextmanager
def called(function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    function(*arguments)
    yield


def states() -> dict[str, Callable[[], Any]]:
    from torch._subclasses import FakeTensorMode

    return {
        "a new process": contextlib.nullcontext,
        "default dtype float64": lambda: called(torch.set_default_dtype, torch.float64),
        "default dtype float16": lambda: called(torch.set_default_dtype, torch.float16),
        "default dtype bfloat16": lambda: called(torch.set_default_dtype, torch.bfloat16),
        "default device meta": lambda: called(torch.set_default_device, "meta"),
        "while a model is made on meta": lambda: torch.device("meta"),
        "deterministic algorithms": lambda: called(torch.use_deterministic_algorithms, True),
        "inference mode": torch.inference_mode,
        "without gradients": torch.no_grad,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "with fake tensors": FakeTensorMode,
    }


def asked() -> dict[str, str]:
    found = {}
    for name, target in TARGETS.items():
        module = sys.modules.get(target.module)
        if module is None:
            continue
        try:
            with usual():
                found[name] = str(fix_module(name).broken(module))
        except Undecided as later:
            found[name] = f"needs {later.needs}"
        except TargetMissing:
            found[name] = "missing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def in_a_child(state: Callable[[], Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with state():
                asked()  # what is imported and initialized by a first question is not what is looked for
                before = everything()
                answers = asked()
                after = everything()
            changed = [kind for kind, value in after.items() if value != before[kind]]
            with os.fdopen(writing, "w") as file:
                json.dump({"answers": answers, "changed": changed}, file)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def main() -> None:
    for name in (*NEEDED, *sorted({target.module for target in TARGETS.values()})):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    print(json.dumps({name: in_a_child(state) for name, state in states().items()}))


main()
