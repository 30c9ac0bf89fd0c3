"""Hazards by backend, placement and situation, without the package and with it.

    python -m tests.late.table
    python -m tests.late.table --python OTHER/bin/python --backend plain --backend bnb-nf4

Each interpreter runs all programs twice, in processes of their own. A cell is "hazards, tensors that are not those of
the model that was never moved": what is lost for good, or what a pass gave.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PLACEMENTS: dict[str, dict[str, Any]] = {
    "leaf": {"offload_type": "leaf_level", "use_stream": True},
    "leaf, record": {"offload_type": "leaf_level", "use_stream": True, "record_stream": True},
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    "block, record": {
        "offload_type": "block_level",
        "num_blocks_per_group": 1,
        "use_stream": True,
        "record_stream": True,
    },
}
_STOPPED = (("run",), ("stop", "RuntimeError", 40, "before"))
SITUATIONS: dict[str, tuple[tuple, ...]] = {
    "runs": (("run",), ("run",), ("weights",)),
    "stopped, then a run": (*_STOPPED, ("run",), ("weights",)),
    "stopped, then state_dict()": (*_STOPPED, ("weights",)),
    "stopped, then a LoRA": (*_STOPPED, ("load_lora", 0), ("run",), ("weights",)),
    "FirstBlockCache, gradients on": (("run",), ("cache", "FirstBlockCache"), ("grad",), ("weights",)),
    "training": (("run",), ("train",), ("train",), ("weights",)),
}


def rows(backends: list[str], placements: list[str]) -> None:
    """Print one row for each program as JSON: release, backend, placement, situation, what was found."""
    import diffusers

    from . import programs

    with tempfile.TemporaryDirectory() as folder, programs.quiet():
        checkpoint = programs.saved(Path(folder))
        for backend in backends:
            for placement in placements:
                for situation, steps in SITUATIONS.items():
                    what = programs.Program(0, backend, PLACEMENTS[placement], steps)
                    found = _found(checkpoint, what)
                    print(
                        json.dumps([diffusers.__version__, backend, placement, situation, found]), flush=True
                    )


def _found(checkpoint: Path, what: Any) -> str:
    from . import programs

    if what.steps[-2][0] == "train" and what.options["offload_type"] == "leaf_level":
        return "-"  # autograd finds the weights where they were brought back to
    if "grad" in str(what.steps) and what.options["offload_type"] == "block_level":
        return "-"  # that cache skips no blocks there
    try:
        wrong = programs.run(checkpoint, what)
    except Exception as error:
        return type(error).__name__
    said = [line for line in wrong if line.startswith("step ")]
    hazards = sum(int(line.split(", ")[1].split()[0]) for line in wrong if not line.startswith("step "))
    if not wrong:
        return "0"
    if not said:
        return str(hazards)
    what_said = said[0].partition(": ")[2]
    tensors = what_said.partition(" of ")[0]
    return f"{hazards}, {tensors if tensors.isdigit() else what_said.partition(':')[0]}"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.late.table", description=__doc__)
    parser.add_argument("--python", action="append", help="an interpreter with other releases (repeatable)")
    parser.add_argument("--backend", action="append", help="only this one (repeatable)")
    parser.add_argument(
        "--placement", action="append", choices=tuple(PLACEMENTS), help="only this one (repeatable)"
    )
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    placements = asked.placement or list(PLACEMENTS)
    if asked.rows:
        from tests import rig
        from tests.sweep.backends import BACKENDS, installed

        if reason := rig.unavailable_reason():
            print(f"the rig is not available: {reason}", file=sys.stderr)
            return 2
        rows(asked.backend or [name for name in BACKENDS if installed(name)], placements)
        return 0
    print("| diffusers | backend | group offloading on a stream | situation | without | with |")
    print("|---|---|---|---|---|---|", flush=True)
    for python in asked.python or [sys.executable]:
        without, with_us = (_side(python, asked.backend or [], placements, value) for value in ("off", "on"))
        for key, found in with_us.items():
            if {found, without.get(key)} != {"-"}:
                print(f"| {' | '.join(key)} | {without.get(key, '?')} | {found} |", flush=True)
    return 0


def _side(
    python: str, backends: list[str], placements: list[str], package: str
) -> dict[tuple[str, ...], str]:
    names = [argument for name in backends for argument in ("--backend", name)]
    names += [argument for name in placements for argument in ("--placement", name)]
    command = [
        python,
        "-c",
        f"import diffusers_quantfix, runpy, sys; sys.argv = {['table', '--rows', *names]!r}; ",
    ]
    command[-1] += "runpy.run_module('tests.late.table', run_name='__main__')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DIFFUSERS_QUANTFIX": package}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {tuple(line[:4]): line[4] for line in lines}


if __name__ == "__main__":
    sys.exit(main())
