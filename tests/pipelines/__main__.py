"""``python -m tests.pipelines``: every pipeline of this release, every backend, every placement.

With ``--json FILE`` the results go to that file after each pipeline, and a run that is started again goes on where it
stopped. Each pipeline runs in a process of its own, forked after the libraries were imported, under a time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from tests.part import HELP, WHOLE, part_of, read_part
from tests.pipelines import check, lora, modular, placing, results
from tests.pipelines.backends import BACKENDS, CANNOT, takes
from tests.pipelines.families import OPTIONAL, every, families, is_built
from tests.pipelines.forked import renew_threads
from tests.pipelines.outcomes import EXACT


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
    parser.add_argument("--families", action="store_true", help="one pipeline of each family")
    parser.add_argument(
        "--optional", action="store_true", help="those that ask for a package that the tests do not install"
    )
    parser.add_argument("--part", type=read_part, default=WHOLE, metavar="K/M", help=HELP)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=300, help="seconds for one step of a pipeline")
    parser.add_argument(
        "--again", action="store_true", help="what is not exact once more, also what is upstream's"
    )
    parser.add_argument("--json", type=Path, help="file of results to go on with")
    given = parser.parse_args(argv)
    with ready():  # before the libraries are imported: the rig keeps the code for CUDA out
        if given.json and not results.reserve(given.json):
            parser.error(f"another run writes {given.json}")
        return run(given)


def run(given: argparse.Namespace) -> int:
    """What the command line asks for; 1 where something went wrong that is not upstream's."""
    names = sorted(min(one) for one in families().values()) if given.families else sorted(every())
    names = [name for name in names if name in OPTIONAL or not given.optional]
    chosen = [one for one in (*placing.ALL, *modular.ALL) if re.search(given.placement, one)]
    work = []
    for index, name in enumerate(names):
        if not is_built(name) or not re.search(given.family, name):
            continue
        if given.slice:
            work.append((name, *portion(index, name)))
            continue
        for turn, backend in enumerate(BACKENDS):
            if backend in (given.backend or BACKENDS) and takes(every()[name], backend):
                placements = list(part_of(possible(name, backend), given.part, index + turn))
                work.append((name, backend, [one for one in placements if one in chosen]))
    if given.slice:
        work = list(part_of(work, given.part))
    found = results.read(given.json)
    todo = []
    for name, backend, placements in work:
        # A busy machine is no verdict. What is done again stays in the file until there is another outcome.
        known = {
            step: said
            for step, said in found["outcomes"].get(name, {}).get(backend, {}).items()
            if not (said.startswith(results.LATE) or (given.again and said != EXACT))
        }
        left = [placement for placement in placements if placement not in known]
        if left and not any(known.get(step, EXACT) != EXACT for step in ("build", "load")):
            todo.append((name, backend, left))
    where = f"written into {given.json}" if given.json else "not kept without --json FILE"
    print(f"{len(work)} pipelines with a backend, {len(work) - len(todo)} of them known; {where}", flush=True)
    bad = False
    for name, backend, outcomes in sweep(todo, given.jobs, given.limit):
        seconds = outcomes.pop("seconds", "?")
        results.record(found, name, backend, outcomes)
        if given.json:
            results.write(found, given.json)
        wrong = {key: said for key, said in outcomes.items() if results.is_wrong(said)}
        bad = bad or bool(wrong)
        print(f"{name} {backend}: {results.summary(outcomes)}, {seconds} s of the processor", flush=True)
        for key, said in wrong.items():
            print(f"    {key}: {said}", flush=True)
    return 1 if bad else 0


def portion(index: int, name: str) -> tuple[str, list[str]]:
    """The one backend and the one placement of a pipeline in a slice: both rotate through the list of pipelines."""
    backends = [one for one in BACKENDS if takes(every()[name], one)]
    backend = backends[index % len(backends)]
    placements = possible(name, backend)
    return backend, [placements[index // len(BACKENDS) % len(placements)]]


def possible(name: str, backend: str) -> list[str]:
    """The placements that a pipeline and a backend have a way for."""
    if name in modular.pipelines():
        return modular.possible()
    left_out = set(CANNOT.get(backend, ()))
    if not lora.is_loaded_by(every()[name]):
        left_out.update(placing.LORAS)
    if name not in placing.COMPILES:
        left_out.update(placing.COMPILED)
    if importlib.util.find_spec("diffusers.hooks") is None:  # it came with diffusers 0.33
        left_out.update(placing.GROUPS, (one for one, of in placing.COMPILED.items() if of in placing.GROUPS))
    return [one for one in placing.ALL if one not in left_out]


@contextlib.contextmanager
def ready():
    """Import what all the processes need, once, and have the rig's devices."""
    from tests import rig

    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import diffusers_quantfix  # noqa: F401  # before the libraries

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rig.load()  # before torch, which may be a build for CUDA
    import torch

    torch.set_num_threads(1)
    every()
    with rig.devices():
        yield


def sweep(todo, jobs: int, limit: float):
    """(name, backend, outcomes) as they come, with ``jobs`` processes; ``limit`` is for one step, in seconds.

    After a step that ended a process, or that was never done, another process goes on with the steps behind it.
    """
    waiting, running = list(todo), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Running(waiting.pop(0), limit))
            multiprocessing.connection.wait([one.reader for one in running], timeout=1)
            for one in list(running):
                if not one.goes_on():
                    running.remove(one)
                    if one.left:
                        waiting.append((*one.task[:2], one.left))
                    yield one.task[0], one.task[1], one.outcomes
    finally:
        for one in running:
            one.end()


class _Running:
    """A process that examines one pipeline with one backend."""

    def __init__(self, task, limit: float):
        context = multiprocessing.get_context("fork")
        self.task, self.limit = task, limit
        self.folder = tempfile.mkdtemp()
        self.reader, writer = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(*task, writer, Path(self.folder)))
        self.process.start()
        writer.close()
        self.outcomes: dict[str, str] = {}
        self.left: list[str] = []  # placements for another process
        self.until = time.monotonic() + limit

    def goes_on(self) -> bool:
        try:
            while self.reader.poll():
                key, said = self.reader.recv()
                self.outcomes[key] = said
                self.until = time.monotonic() + self.limit
        except EOFError:
            self.process.join()
            if self.process.exitcode:
                self._missing(f"Crash: the process ended with {self.process.exitcode}")
            self.end()
            return False
        if time.monotonic() <= self.until:
            return True
        self.end()
        self._missing(f"{results.LATE} after {self.limit:.0f} s")
        return False

    def end(self) -> None:
        """End the process and those that it forked, and remove its files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _missing(self, said: str) -> None:
        """Say it of the first step that has no outcome; the placements behind it are left."""
        placements = self.task[2]
        step = next((step for step in ("build", "load", *placements) if step not in self.outcomes), None)
        if step:
            self.outcomes[step] = said
        if step in placements:
            self.left = placements[placements.index(step) + 1 :]


def _child(name: str, backend: str, placements: list[str], writer: Any, folder: Path) -> None:
    import torch

    os.setpgid(0, 0)
    renew_threads()
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        devices = torch.device("cuda:0"), torch.device("cuda:1")
        others = (modular.ModularSubject, modular.place) if name in modular.pipelines() else ()
        for key, said in check.examine(name, backend, placements, devices, folder, *others):
            writer.send((key, said))
        writer.send(("seconds", round(sum(os.times()[:4]), 1)))
    writer.close()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
