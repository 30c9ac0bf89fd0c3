"""``--part``: together the parts are the whole, and a part is of all kinds of placements."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from tests.part import part_of, read_part


def test_together_they_are_the_whole():
    placements = ["a", "b", "c", "d", "e", "f", "g"]
    parts = [part_of(placements, (part, 3), turn=5) for part in (1, 2, 3)]
    assert sorted(one for part in parts for one in part) == placements
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_next_pipeline_has_others():
    assert part_of(["a", "b", "c"], (1, 3), turn=0) != part_of(["a", "b", "c"], (1, 3), turn=1)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "2", "a/b", "", "1/2/3", "-1/2"])
def test_no_part_of_a_whole(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no part of a whole"):
        read_part(text)


def test_of_tests_that_a_marker_chose(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [pytest.param(n, marks=[pytest.mark.long] * (n % 3 > 0)) for n in range(9)])\n"
        "def test(n): pass\n"
    )

    def collected(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.part", "--collect-only", "-q", str(file)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        return [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    chosen = [collected("-m", "long", "--part", f"{part}/2") for part in (1, 2)]
    assert sorted(chosen[0] + chosen[1]) == [f"test[{n}]" for n in range(9) if n % 3]
    assert len(chosen[0]) == len(chosen[1])
    assert len(collected()) == 9
