"""A short soak in CI; `tests.soak` says how to run a long one."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.soak.cycles import plans, run
from tests.sweep.backends import BACKENDS, installed

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="the soak is about the newest releases"),
]


def test_a_seed_repeats_a_run() -> None:
    assert plans(3, 20, ["a", "b"]) == plans(3, 20, ["a", "b"]) != plans(4, 20, ["a", "b"])


def test_nothing_piles_up(gpu, tmp_path) -> None:
    backends = [name for name in BACKENDS if installed(name)]
    assert not run(gpu, tmp_path, backends, plans(0, 16, backends), print)
