"""Of tests with many cases some run with the README's test command, and all where paths are given."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests import chosen_cases
from tests.trees import ROOT

TESTS = """
import pytest
from diffusers_quantfix.fixes.targets import TARGETS

@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", range(9))
def test_many(mode, bits):
    assert (mode, bits) != (0, 4)

@pytest.mark.parametrize("mode", range(3))
def test_few(mode): pass

@pytest.mark.parametrize("n", [pytest.param(n, marks=[pytest.mark.long] * (n > 2)) for n in range(9)])
def test_few_are_not_long(n): pass

@pytest.mark.parametrize("fix_id", [*TARGETS][:4])
def test_each_fix(fix_id): pass
"""


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "tests" / "fixes"
    folder.mkdir(parents=True)
    shutil.copy(chosen_cases.__file__, tmp_path / "conftest.py")
    (folder / "test_some.py").write_text(TESTS)
    (tmp_path / "tests" / "test_other.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\naddopts = -q -m 'not long'\nmarkers = long\n"
    )

    def run(*arguments: str) -> list[str]:
        """The output of pytest, a line each."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={"PYTHONPATH": str(ROOT), "DIFFUSERS_QUANTFIX": "off", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        return done.stdout.splitlines()

    return run


def names(lines: Iterable[str]) -> list[str]:
    return [line.rpartition("::")[2].split()[0] for line in lines if "::test_" in line]


def test_some_run_where_no_path_is_given(project):
    found = names(line for line in project("--collect-only") if "test_other" not in line)
    assert len([name for name in found if name.startswith("test_few[")]) == 3
    assert len([name for name in found if name.startswith("test_few_are_not_long[")]) == 3
    assert len([name for name in found if name.startswith("test_each_fix[")]) == 4
    many = [name for name in found if name.startswith("test_many[")]
    assert many[0] == "test_many[0-4]" and 5 <= len(many) <= 7
    assert {name.rpartition("-")[2] for name in many} == {"4]", "8]"}
    rest = names(line for line in project("--collect-only", "-m", "long") if "test_other" not in line)
    assert len(rest) + len(found) == 18 + 3 + 9 + 4 and not {*rest} & {*found}


def test_all_run_in_another_folder(project):
    found = names(line for line in project("--collect-only") if "test_other" in line)
    assert len([name for name in found if name.startswith("test_many[")]) == 18


def test_all_run_where_paths_are_given(project):
    found = names(project("--collect-only", "tests/fixes"))
    assert len([name for name in found if name.startswith("test_many[")]) == 18


def test_what_failed_is_chosen_again(project):
    assert "2 failed" in project()[-1]
    assert project("--last-failed")[-1].startswith("2 failed")
    assert project("--last-failed", "-m", "long", "--last-failed-no-failures", "none")[-1].startswith(
        "2 deselected"
    )


@pytest.mark.parametrize("values", [2, 3, 4, 5])
def test_the_values_of_the_last_parameter_take_turns(values):
    chosen = [number for number in range(60) if chosen_cases.is_chosen(number)]
    assert {number % values for number in chosen} == set(range(values))
    assert len(chosen) == 20
