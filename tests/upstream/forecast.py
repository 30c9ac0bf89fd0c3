"""What a run of the matrix will take, said before it begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .cells import Cell
from .environments import is_ready
from .run_cell import previous, result_file

# Measured: a CUDA build of torch with its libraries, the same for one more Python, the other releases of a set.
TORCH_GB, PYTHON_GB, SET_GB = 7.0, 2.3, 0.3
MINUTES = 3.0  # of a set that never ran here


def forecast(
    cells: list[Cell],
    folder: Path,
    jobs: int,
    fresh: bool = False,
    quick: bool = False,
    fixes: tuple[str, ...] = (),
) -> str:
    """One sentence: how many sets run, the disk space that they need at most, and about how long they take.

    Args: see `tests.upstream.__main__.run`.
    """
    before = {cell.name: previous(folder, cell, quick, fixes) for cell in cells}
    left = [cell for cell in cells if fresh or not before[cell.name] or before[cell.name]["failures"]]
    if not left:
        return f"{len(cells)} sets, all of them done before"
    minutes = sum(_minutes(folder, cell, fixes) for cell in left) / min(jobs, len(left))
    done = f"; {len(cells) - len(left)} were done before" if len(left) < len(cells) else ""
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / 1e9
    return (
        f"{len(left)} of {len(cells)} sets run{done}: at most {space(left, cells, folder):.0f} GB of disk "
        f"({free:.0f} GB are free) and about {minutes:.0f} min with {jobs} at a time; an interrupted run goes on"
    )


def space(left: list[Cell], cells: list[Cell], folder: Path) -> float:
    """GB that the environments of these sets need that are not there yet.

    A torch that another environment has takes no more space: uv links its files. A local wheel of torch takes less.
    """
    have = {(cell.pins["torch"], cell.python) for cell in cells if is_ready(cell, folder)}
    total = 0.0
    for cell in left:
        if is_ready(cell, folder):
            continue
        total += SET_GB
        torch = (cell.pins["torch"], cell.python)
        if torch not in have:
            total += PYTHON_GB if torch[0] in {release for release, _ in have} else TORCH_GB
            have.add(torch)
    return total


def _minutes(folder: Path, cell: Cell, fixes: tuple[str, ...]) -> float:
    """What a set took when it last ran, and twice the usual where its environment is to be built."""
    try:
        result = json.loads(result_file(folder, cell, fixes).read_text(encoding="utf-8"))
        return float(result["seconds"]["all"]) / 60
    except (OSError, ValueError, KeyError):
        return MINUTES * (1 if is_ready(cell, folder) else 2)
