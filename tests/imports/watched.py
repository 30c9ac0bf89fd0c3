"""A process that imports every patched module while a second thread watches its state and forks.

Prints one JSON object: for each kind of state, how often it changed, and the first two values; the children that found
another value than their parent had at its start.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import sys
import threading
import time

from tests.imports.state import everything

FORKS = 40


def main() -> None:
    import numpy.random  # noqa: F401
    import torch

    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    # A first read initializes what torch makes when it is asked.
    everything()
    start = everything()
    changes: dict[str, list[str]] = {}
    children: list[list[str]] = []
    done = threading.Event()

    def watch() -> None:
        moments = random.Random(int(sys.argv[1]))
        due = 0.0
        while not done.is_set():
            for name, value in everything().items():
                if value != start[name] and name not in changes:
                    changes[name] = [repr(start[name])[:300], repr(value)[:300]]
            time.sleep(0.001)  # else the imports take a minute
            if time.monotonic() > due and len(children) < FORKS:
                due = time.monotonic() + moments.random() / 4
                children.append(_forked(start))

    thread = threading.Thread(target=watch)
    sys.setswitchinterval(1e-5)
    start["switch interval"] = sys.getswitchinterval()
    start["threads"] = str(int(start["threads"]) + 1)
    thread.start()
    time.sleep(0.1)
    import diffusers_quantfix
    from diffusers_quantfix.fixes import MODULES

    for target in sorted(MODULES):
        with contextlib.suppress(Exception):
            importlib.import_module(target)
    done.set()
    thread.join()
    states = [fix.state for fix in diffusers_quantfix.status(load=False)]
    print(json.dumps({"changes": changes, "children": children, "applied": states.count("applied")}))


def _forked(start: dict[str, object]) -> list[str]:
    """The kinds of state that are not in a child what they were at the start of the parent."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = everything()
            differ = [name for name, value in found.items() if value != start[name]]
            os.write(writing, json.dumps(differ).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else ["the child died"]


main()
