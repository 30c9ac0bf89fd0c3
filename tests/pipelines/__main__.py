"""``python -m tests.pipelines``: every pipeline of this release, every backend, every placement.

The results go to a file after each pipeline; a run that is started again goes on where it stopped. Each pipeline runs
in a process of its own, forked after the libraries were imported, under a time limit.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from tests.pipelines import check, results
from tests.pipelines.backends import BACKENDS
from tests.pipelines.families import NOT_BUILT, pipelines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pipelines", description=__doc__)
    parser.add_argument("--family", default="", help="pipelines whose name matches this pattern")
    parser.add_argument(
        "--backend", action="append", choices=BACKENDS, help="may be repeated; all by default"
    )
    parser.add_argument("--placement", default="", help="placements whose name matches this pattern")
    parser.add_argument(
        "--slice", action="store_true", help="each pipeline with one backend and one placement"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=300, help="seconds for one pipeline with one backend")
    parser.add_argument("--json", type=Path, help="file of results to go on with")
    given = parser.parse_args(argv)
    names = [name for name in pipelines() if re.search(given.family, name) and name not in NOT_BUILT]
    if given.slice:
        work = [(name, *portion(name)) for name in names]
    else:
        chosen = [one for one in check.ALL if re.search(given.placement, one)]
        work = [(name, backend, chosen) for backend in given.backend or BACKENDS for name in names]
    found = results.read(given.json)
    todo = []
    for name, backend, placements in work:
        known = found["outcomes"].setdefault(name, {}).setdefault(backend, {})
        for step in [step for step, said in known.items() if said.startswith(results.LATE)]:
            del known[step]  # a busy machine; once more
        left = [placement for placement in placements if placement not in known]
        if left and not any(known.get(step, check.EXACT) != check.EXACT for step in ("build", "load")):
            todo.append((name, backend, left))
    print(f"{len(work)} pipelines with a backend, {len(work) - len(todo)} of them known", flush=True)
    ready()
    bad = 0
    for done, (name, backend, outcomes) in enumerate(sweep(todo, given.jobs, given.limit), 1):
        found["outcomes"].setdefault(name, {}).setdefault(backend, {}).update(outcomes)
        if given.json:
            results.write(found, given.json)
        wrong = {key: said for key, said in outcomes.items() if results.is_wrong(said)}
        bad += bool(wrong)
        print(f"[{done}/{len(todo)}] {name} {backend}: {results.summary(outcomes)}", flush=True)
        for key, said in wrong.items():
            print(f"    {key}: {said}", flush=True)
    print(f"{len(todo) - bad} of {len(todo)} without a fault")
    return 1 if bad else 0


def portion(name: str) -> tuple[str, list[str]]:
    """The one backend and the one placement of a pipeline in the slice: both rotate through the list of pipelines."""
    index = sorted(pipelines()).index(name)
    return list(BACKENDS)[index % len(BACKENDS)], [check.ALL[index // len(BACKENDS) % len(check.ALL)]]


def ready() -> None:
    """Import what all the processes need, once, with the rig's library loaded before the first backward pass."""
    from tests import rig

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import diffusers_quantfix  # noqa: F401  # before the libraries

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch

    torch.set_num_threads(1)
    rig.load()
    pipelines()


def sweep(todo, jobs: int, limit: float):
    """(name, backend, outcomes) as they come, with ``jobs`` processes."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(todo), []
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(*task, writer), daemon=True)
            process.start()
            writer.close()
            running.append((task, process, reader, time.monotonic() + limit, {}))
        multiprocessing.connection.wait([reader for _, _, reader, _, _ in running], timeout=1)
        for entry in list(running):
            task, process, reader, until, outcomes = entry
            finished = False
            try:
                while reader.poll():
                    key, said = reader.recv()
                    outcomes[key] = said
            except EOFError:
                finished = True
            if not finished and time.monotonic() > until:
                process.kill()
                finished = True
                _missing(task, outcomes, f"{results.LATE} after {limit:.0f} s")
            if finished:
                process.join()
                if process.exitcode not in (0, -9):
                    _missing(task, outcomes, f"Crash: the process ended with {process.exitcode}")
                running.remove(entry)
                yield task[0], task[1], outcomes


def _missing(task, outcomes: dict[str, str], said: str) -> None:
    """Say it of the first step that has no outcome."""
    for step in ("build", "load", *task[2]):
        if step not in outcomes:
            outcomes[step] = said
            return


def _child(name: str, backend: str, placements: list[str], writer: Any) -> None:
    import torch

    from tests import rig

    with open(os.devnull, "w") as nowhere, rig.devices(), tempfile.TemporaryDirectory() as folder:
        sys.stdout = sys.stderr = nowhere
        devices = torch.device("cuda:0"), torch.device("cuda:1")
        for key, said in check.examine(name, backend, placements, devices, Path(folder)):
            writer.send((key, said))
    writer.close()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
