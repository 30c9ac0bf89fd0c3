"""The harness itself: what becomes of a program that hangs, and of the processes that it started."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from tests.programs import harness
from tests.programs.harness import Failed, run

pytestmark = [pytest.mark.thorough, pytest.mark.long]

# A process that starts another and tells its id; both then wait in `hang`.
HANGS = """
import pathlib, subprocess, sys, time
def hang():
    time.sleep(1000)
if "child" not in sys.argv:
    child = subprocess.Popen([sys.executable, __file__, "child"], start_new_session={session})
    pathlib.Path("child").write_text(str(child.pid))
    {then}
hang()
"""
LEAVES = "print('RESULT 1'); sys.exit()"
# Hangs the first time that it runs in its folder.
HANGS_ONCE = """
import pathlib, sys, time
package = "diffusers_quantfix" in sys.modules
runs = pathlib.Path("runs")
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
if {where} and len(runs.read_text()) == 1:
    time.sleep(1000)
print("RESULT", len(runs.read_text()))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes the text of a program and gives it a few seconds."""
    monkeypatch.setattr(harness, "HERE", tmp_path)
    monkeypatch.setattr(harness, "SECONDS", 5)

    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(text)
        return "program"

    return write


def _ends(folder: Path) -> bool:
    """Whether the child is gone, or goes now: a signal takes its time."""
    child = int((folder / "without" / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        return not psutil.wait_procs([psutil.Process(child)], timeout=30)[1]
    return True


@pytest.mark.parametrize("session", [False, True], ids=["same session", "session of its own"])
def test_all_processes_of_a_program_that_hangs_tell_where_and_end(program, tmp_path, session) -> None:
    name = program(HANGS.format(session=session, then=""))
    with (
        pytest.warns(UserWarning, match="program hangs without the package, so it is started once more"),
        pytest.raises(Failed, match="twice it ran longer than 5 seconds") as failed,
    ):
        run(name, tmp_path, package=False)
    assert str(failed.value).count("in hang") == 2
    assert _ends(tmp_path)


def test_a_child_that_is_left_behind_is_ended(program, tmp_path) -> None:
    assert run(program(HANGS.format(session=False, then=LEAVES)), tmp_path, package=False) == 1
    assert _ends(tmp_path)


def test_code_of_others_that_hangs_is_started_once_more(program, tmp_path) -> None:
    with pytest.warns(UserWarning, match="program hangs without the package, so it is started once more"):
        assert run(program(HANGS_ONCE.format(where="True")), tmp_path, package=False) == 2


def test_a_hang_with_the_package_alone_is_a_failure(program, tmp_path) -> None:
    with pytest.raises(Failed, match="ran longer than 5 seconds"):
        run(program(HANGS_ONCE.format(where="package")), tmp_path)
    assert [len((tmp_path / side / "runs").read_text()) for side in ("with", "without")] == [1, 1]


def test_a_hang_on_both_sides_is_not_ours(program, tmp_path) -> None:
    with pytest.warns(UserWarning, match="program hangs without the package"):
        assert run(program(HANGS_ONCE.format(where="True")), tmp_path) == 2
