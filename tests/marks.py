"""Which cases of a test run with the README's test command; pyproject.toml says when those with a marker run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest


def rest_is_long(values: Iterable, *now) -> list:
    """For `parametrize`: the values of ``now`` run with every other test, the rest has the marker ``long``."""
    return _marked(pytest.mark.long, values, now)


def rest_is_whole(values: Iterable, *now) -> list:
    """The same with the marker ``whole``: the rest runs on request."""
    return _marked(pytest.mark.whole, values, now)


def in_turn(each: Iterable, *others: Iterable) -> list[tuple]:
    """All of ``each``, with a value of each of the others, which take turns."""
    return list(zip(each, *map(itertools.cycle, others), strict=False))


def _marked(mark: pytest.MarkDecorator, values: Iterable, now: tuple) -> list:
    values = list(values)
    assert set(now) < set(values), f"not among the values: {sorted(map(str, set(now) - set(values)))}"
    return [value if value in now else pytest.param(*_several(value), marks=mark) for value in values]


def _several(value) -> tuple:
    """The values of one case, for `pytest.param`: several where several names are parametrized together."""
    return value if isinstance(value, tuple) else (value,)
