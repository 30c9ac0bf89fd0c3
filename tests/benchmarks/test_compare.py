"""`--compare`: it fails on a missed goal and on what grew by more than its noise, and on nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.benchmarks.compare import as_dicts, compared, merged, read
from tests.benchmarks.figure import Row
from tests.benchmarks.measure import ROOT


@pytest.mark.parametrize(
    ("old", "new", "fails", "said"),
    [
        (Row("a", 1.0, goal=1.2, noise=0.05), Row("a", 1.08, goal=1.2, noise=0.05), False, ""),
        (Row("a", 1.0, goal=1.2, noise=0.02), Row("a", 1.08, goal=1.2, noise=0.02), True, "grew by 0.08"),
        (Row("a", 1.0, noise=0.02), Row("a", 1.08, noise=0.02), True, "grew by 0.08"),
        (Row("a", 1.0, goal=1.2, noise=0.02), Row("a", 0.5, goal=1.2, noise=0.02), False, ""),
        (Row("a", 1.3, goal=1.2), Row("a", 1.3, goal=1.2), True, "misses its goal"),
        (Row("a", 1.0, goal=1.2), Row("a", 1.1, goal=1.2), False, "noise not measured"),
        (Row("a", 3, "", 5), Row("a", 4, "", 5), True, "grew by 1"),
        (Row("a", 0, "", 0, exact=True), Row("a", 0, "", 0, exact=True), False, ""),
        (Row("  peer: a", 1.0, noise=0.0), Row("  peer: a", 9.0, noise=0.0), False, ""),
        (Row("a", 9.0, "GB/s", noise=0.0), Row("a", 20.0, "GB/s", noise=0.0), False, ""),
        (Row("a", 1.0, goal=1.2), Row("a", None, goal=1.2), True, "not measured any more"),
    ],
)
def test_what_fails(old, new, fails, said):
    ((line, failed),) = compared([old], [new])
    assert failed is fails
    assert said in line
    assert said or not line.rstrip().endswith(("noise", "goal"))


def test_what_is_on_one_side_only():
    lines = list(compared([Row("old", 1.0, goal=2.0)], [Row("new", 1.0, goal=2.0)]))
    assert [failed for _, failed in lines] == [False, True]
    assert lines[1][0].endswith("gone")


def test_noise_is_how_far_the_repeats_are_apart():
    (row,) = merged([[Row("a", 1.0)], [Row("a", 1.3)], [Row("a", 1.1)]])
    assert (row.value, round(row.noise, 6)) == (1.1, 0.3)
    assert merged([[Row("a", 1.0)]]) == [Row("a", 1.0)]


def test_a_file_is_read_as_it_was_written(tmp_path):
    rows = [Row("a", 1.0, goal=1.2, noise=0.1, detail="x"), Row("b", None)]
    (tmp_path / "r.json").write_text(json.dumps({"rows": as_dicts(rows)}))
    assert read(tmp_path / "r.json") == rows
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(ValueError, match="no result file"):
        read(tmp_path / "r.json")


def test_the_command_shows_both_and_exits_with_1_where_one_grew(tmp_path):
    paths = []
    for name, value in (("old", 1.0), ("new", 1.1)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"rows": as_dicts([Row("a ratio", value, goal=1.2, noise=0.01)])}))

    def run(*arguments):
        command = [sys.executable, "-m", "tests.benchmarks", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = run("--compare", paths[0], "--results", paths[1])
    assert (done.returncode, done.stderr) == (1, "")
    assert "a ratio" in done.stdout and "1.1 x" in done.stdout and "grew by 0.1" in done.stdout
    assert run("--compare", paths[1], "--results", paths[0]).returncode == 0
    assert run("--results", paths[0]).returncode == 2
    assert "no result file" in run("--compare", tmp_path / "none.json").stderr
