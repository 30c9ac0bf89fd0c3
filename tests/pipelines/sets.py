"""``python -m tests.pipelines.sets``: the newest release set, then older ones, each in its own environment.

Every set has a file of results, and what is in it is not run again. All other arguments are those of
``python -m tests.pipelines``: ``--families`` for one pipeline of each family, ``--part 1/4`` and so on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.pipelines import results
from tests.upstream import cells, environments

ROOT = Path(__file__).resolve().parents[2]
NEWEST = "newest"


def main(argv: list[str]) -> int:
    """1 where a set cannot be installed, or something went wrong in it that is not upstream's."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.pipelines.sets", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--set", action="append", choices=(NEWEST, *results.OLDER), dest="sets", help="all by default"
    )
    given, passed = parser.parse_known_args(argv)
    bad = False
    for name in given.sets or (NEWEST, *results.OLDER):
        try:
            python, variables = _environment(name)
        except environments.CannotInstall as error:
            print(f"{name}: {error}", flush=True)
            bad = True
            continue
        file = results.FILE if name == NEWEST else results.older(name)
        print(f"{name}: {file.name}", flush=True)
        command = [str(python), "-m", "tests.pipelines", "--json", str(file), *passed]
        bad = bool(subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode) or bad
    return int(bad)


def _environment(name: str) -> tuple[Path, dict[str, str]]:
    """The interpreter of a set, and the variables for it; a missing environment is built.

    Raises:
        CannotInstall: with the requirement that failed.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    if name == NEWEST:
        return Path(sys.executable), variables
    folder = environments.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    [cell] = cells.read().select([name])
    made = environments.prepare(cell, folder, folder / f"pipelines-{name}.log")
    return made.python, {**variables, **made.variables}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
