"""``--part K/M``: the K-th of M parts that together are the whole, of pytest's tests too.

On a slow machine the project's own check takes a part of what is long, the others at other commits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
Part = tuple[int, int]
WHOLE: Part = (1, 1)
HELP = "of M parts that cover all together, the K-th"


def read_part(text: str) -> Part:
    """``K/M`` as numbers.

    Raises:
        argparse.ArgumentTypeError: it is no part of a whole.
    """
    numbers = text.split("/")
    if len(numbers) == 2 and all(map(str.isdecimal, numbers)):
        part, parts = map(int, numbers)
        if 1 <= part <= parts:
            return part, parts
    raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole: 1/2, for example")


def part_of(items: Sequence[T], part: Part, turn: int = 0) -> Sequence[T]:
    """Every M-th of them; which is the first goes on with ``turn``, from list to list."""
    return items[(part[0] - 1 + turn) % part[1] :: part[1]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=read_part, default=WHOLE, metavar="K/M", help=HELP)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After the markers have chosen, so that the parts are of one size."""
    kept = part_of(items, config.getoption("--part"))
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
