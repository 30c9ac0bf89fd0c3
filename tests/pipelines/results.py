"""The files of results, one for each release set: pipeline -> backend -> placement -> outcome."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.pipelines.outcomes import EXACT

FILE = Path(__file__).parent / "results.json"  # of the newest releases
OLDER = ("D12", "D09", "D07", "D02")  # rows of tests/upstream/cells.toml
LATE = "TimeoutError: not done"
LIBRARIES = (
    *("torch", "diffusers", "transformers", "accelerate", "bitsandbytes", "optimum-quanto", "torchao"),
    *("torchvision", "opencv-python-headless", "librosa"),
)


def read(path: Path | None) -> dict:
    if path is not None and path.exists():
        found = json.loads(path.read_text())
        outcomes = {
            name: {backend: said for backend, said in backends.items() if said}
            for name, backends in found["outcomes"].items()
        }
        return {**found, "outcomes": {name: said for name, said in outcomes.items() if said}}
    return {"versions": versions(), "outcomes": {}}


def older(cell: str) -> Path:
    """The file of an older release set."""
    return FILE.with_name(f"results-{cell}.json")


def reserve(path: Path) -> bool:
    """Keep other runs off the file until this process ends; False where another has done so. Forked ones do not."""
    handle = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write(found: dict, path: Path) -> None:
    """Whole or not at all: a run may be stopped at any time."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    unfinished.replace(path)


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def record(found: dict, name: str, backend: str, outcomes: dict[str, str]) -> None:
    """Put the outcomes of a run that just ended into ``found``, and with which releases, where they are others.

    ``versions`` are those of the file's set. ``also_with``: the releases that differ from them, as text -> pipeline ->
    backend -> placements.
    """
    found["outcomes"].setdefault(name, {}).setdefault(backend, {}).update(outcomes)
    also = found.setdefault("also_with", {})
    for key, pipelines in list(also.items()):
        backends = pipelines.get(name, {})
        if backend in backends:
            backends[backend] = [one for one in backends[backend] if one not in outcomes]
        also[key] = _without_empty(pipelines)
    others = ", ".join(
        f"{library} {release}"
        for library, release in versions().items()
        if found["versions"].get(library) != release
    )
    if others:
        backends = also.setdefault(others, {}).setdefault(name, {})
        backends[backend] = sorted({*backends.get(backend, ()), *outcomes})
    found["also_with"] = {key: pipelines for key, pipelines in also.items() if pipelines}


def _without_empty(pipelines: dict) -> dict:
    kept = {
        name: {one: each for one, each in backends.items() if each} for name, backends in pipelines.items()
    }
    return {name: backends for name, backends in kept.items() if backends}


def is_wrong(said: str) -> bool:
    return said != EXACT and not said.startswith("upstream: ")


def summary(outcomes: dict[str, str]) -> str:
    kinds = Counter(
        EXACT if said == EXACT else "upstream's" if said.startswith("upstream: ") else "wrong"
        for key, said in outcomes.items()
        if key not in ("build", "load")
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no placement ran"
