"""The long run; see the package."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
from pathlib import Path

import diffusers_quantfix  # noqa: F401  # activates, as the first line of a user's program does
from tests import rig
from tests.rig.fixtures import RealDevices, RigDevices
from tests.sweep.backends import BACKENDS, installed

from .cycles import plans, run


def main() -> int:
    """Run the cycles; 0 if all was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--backend", action="append", choices=tuple(BACKENDS), help="only this one (repeatable)"
    )
    asked = parser.parse_args()
    import torch

    for library in ("bitsandbytes", "diffusers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    backends = asked.backend or [name for name in BACKENDS if installed(name)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if torch.cuda.is_available():
            gpu = RealDevices()
        else:
            stack.enter_context(rig.devices())
            gpu = RigDevices()
        wrong = run(gpu, folder, backends, plans(asked.seed, asked.cycles, backends), print)
    print(
        "\n".join(wrong)
        or f"{asked.cycles} cycles, seed {asked.seed}, {', '.join(backends)}: all as at the start"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
