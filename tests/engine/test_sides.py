"""The two sides of a test: unknown ids are errors, and a failure says what the board says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .harness import ROOT

TEST = """
import pytest

@pytest.mark.defect({name!r}, shows="no such thing")
def test_fails():
    assert 1 == 2
"""


@pytest.fixture
def run(tmp_path):
    def run(name: str, **variables: str) -> tuple[int, str]:
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.sides"]\n')
        (tmp_path / "test_it.py").write_text(TEST.format(name=name))
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = defect: x\n")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_mark_with_an_unknown_id_is_an_error(run) -> None:
    code, said = run("bnb-quant-state-cod")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "defect('bnb-quant-state-cod') names no target of a fix" in said


def test_a_mark_with_a_fix_of_several_targets_is_an_error(run) -> None:
    code, said = run("int8-tiles-dequantized")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "it has the targets diffusers-int8-tiles-dequantized, peft-" in said


def test_a_failure_says_what_the_board_says(run) -> None:
    code, said = run("bnb-quant-state-code", DIFFUSERS_QUANTFIX="skip:bnb-quant-state-code")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert (
        "bnb-quant-state-code is disabled: switched off by DIFFUSERS_QUANTFIX=skip:bnb-quant-state-code"
        in said
    )
