"""The programs from the command line; see the package."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

import diffusers_quantfix  # noqa: F401  # activates, as the first line of a user's program does
from tests import rig
from tests.sweep.backends import BACKENDS, installed

from . import programs


def main() -> int:
    """Run the programs; 0 if all was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.late", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=0, help="how many; 0: until the time is up")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--backend", action="append", choices=tuple(BACKENDS), help="only this one (repeatable)"
    )
    asked = parser.parse_args()
    reason = rig.unavailable_reason()  # before torch is imported
    import torch

    if reason and not torch.cuda.is_available():
        print(f"the rig is not available: {reason}", file=sys.stderr)
        return 2
    backends = asked.backend or [name for name in BACKENDS if installed(name)]
    end = time.monotonic() + 60 * asked.minutes
    bad = number = 0
    with tempfile.TemporaryDirectory() as folder, programs.quiet():
        checkpoint = programs.saved(Path(folder))
        for seed in itertools.count(asked.seed):
            if number == asked.programs if asked.programs else time.monotonic() > end:
                break
            number += 1
            program = programs.program(seed, backends)
            wrong = programs.run(checkpoint, program)
            print("bad" if wrong else "good", program, flush=True)
            if wrong:
                bad += 1
                print("\n".join(wrong), flush=True)
    print(f"{number} programs from seed {asked.seed}, {', '.join(backends)}: {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
