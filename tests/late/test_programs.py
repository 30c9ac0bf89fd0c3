"""A few random programs over late devices in CI; `tests.late` says how to run more."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.late import programs, table
from tests.rig.fixtures import require_rig
from tests.sweep.backends import BACKENDS, installed

pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.42")), reason="this is about the newest releases")


SEEDS = tuple(range(8))


def test_a_seed_repeats_a_program():
    assert (
        programs.program(3, ["a", "b"]) == programs.program(3, ["a", "b"]) != programs.program(4, ["a", "b"])
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_programs(seed, tmp_path):
    pytest.importorskip("peft")
    require_rig()
    program = programs.program(seed, [name for name in BACKENDS if installed(name)])
    with programs.quiet():
        wrong = programs.run(programs.saved(tmp_path), program)
    assert not wrong, "\n".join([str(program), *wrong])


@pytest.mark.long
def test_a_row_of_the_table(tmp_path):
    """What is healthy has a 0; that the rest is counted, the planted hazards of `tests.rig.test_late` show."""
    require_rig()
    what = programs.Program(0, "plain", table.PLACEMENTS["block"], table.SITUATIONS["runs"])
    with programs.quiet():
        assert table._found(programs.saved(tmp_path), what) == "0"
