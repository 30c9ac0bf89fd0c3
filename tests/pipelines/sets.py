"""``python -m tests.pipelines.sets``: the newest release set, then older ones, each in its own environment.

Every set has a file of results, and what is in it is not run again. All other arguments are those of
``python -m tests.pipelines``: ``--families`` for one pipeline of each family, ``--part 1/4`` and so on.

The set ``optional`` has the newest libraries beside packages that diffusers can do without; it runs the pipelines that
ask for one, and its results are in the file of the newest set.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from tests.pipelines import results
from tests.upstream import cells, environments

ROOT = Path(__file__).resolve().parents[2]
NEWEST = "newest"
OPTIONAL = "optional"
SETS = (NEWEST, OPTIONAL, *results.OLDER)
# torchvision's wheels are for builds of torch with CUDA: the set has the newest pair that works together.
OPTIONAL_PINS = {
    "torch": "2.14.1",
    "torchvision": "0.29.1",
    "opencv-python-headless": "5.0.0.93",
    "librosa": "0.11.0",
    "ftfy": "6.3.1",
}


def main(argv: list[str]) -> int:
    """1 where a set cannot be installed, or something went wrong in it that is not upstream's."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.pipelines.sets", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--set", action="append", choices=SETS, dest="sets", help="all by default")
    given, passed = parser.parse_known_args(argv)
    bad = False
    for name in given.sets or SETS:
        try:
            python, variables = _environment(name)
        except environments.CannotInstall as error:
            print(f"{name}: {error}", flush=True)
            bad = True
            continue
        file = results.FILE if name in (NEWEST, OPTIONAL) else results.older(name)
        print(f"{name}: {file.name}", flush=True)
        command = [str(python), "-m", "tests.pipelines", "--json", str(file), *passed]
        if name == OPTIONAL:
            command.append("--optional")
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
    made = environments.prepare(_cell(name), folder, folder / f"pipelines-{name}.log")
    return made.python, {**variables, **made.variables}


def _cell(name: str) -> cells.Cell:
    """The release set of that name; ``optional`` is the newest of the table with more packages."""
    table = cells.read()
    if name != OPTIONAL:
        return table.select([name])[0]
    newest = max(table.cells, key=lambda cell: (Version(cell.pins["transformers"]), len(cell.pins)))
    return dataclasses.replace(newest, name=name, pins={**newest.pins, **OPTIONAL_PINS})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
