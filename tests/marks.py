"""Which cases of a test run with the README's test command, and which with the project's own check alone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def rest_is_long(values: Iterable, *now) -> list:
    """For `parametrize`: the values of ``now`` run with every other test, the rest has the marker ``long``."""
    values = list(values)
    assert set(now) < set(values), f"not among the values: {sorted(map(str, set(now) - set(values)))}"
    return [
        value if value in now else pytest.param(*_several(value), marks=pytest.mark.long) for value in values
    ]


def _several(value) -> tuple:
    """The values of one case, for `pytest.param`: several where several names are parametrized together."""
    return value if isinstance(value, tuple) else (value,)
