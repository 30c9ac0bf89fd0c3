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
OLDER = ("D12", "D09")  # rows of tests/upstream/cells.toml
LATE = "TimeoutError: not done"
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "bitsandbytes", "optimum-quanto", "torchao")


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


def is_wrong(said: str) -> bool:
    return said != EXACT and not said.startswith("upstream: ")


def summary(outcomes: dict[str, str]) -> str:
    kinds = Counter(
        EXACT if said == EXACT else "upstream's" if said.startswith("upstream: ") else "wrong"
        for key, said in outcomes.items()
        if key not in ("build", "load")
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no placement ran"
