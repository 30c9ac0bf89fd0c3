"""`--compare`: it fails on a missed goal and on what grew by more than its noise, and on nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.benchmarks.compare import compared, merged
from tests.benchmarks.figure import Row
from tests.benchmarks.measure import ROOT
from tests.benchmarks.results import Measurement, Results, read


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
        (Row("a", 1.0), Row("a", None, detail="out of time\x1b[2J", failed=True), True, "out of time [2J"),
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


def test_a_repeat_that_failed_is_not_hidden_by_those_that_did_not():
    failed = Row("a", None, failed=True)
    assert merged([[Row("a", 1.0), Row("b", 1.0)], [failed], [Row("a", 1.1)]]) == [failed, Row("b", 1.0)]


def written(path, *rows: Row):
    Results(path, {"versions": {}}).add(Measurement("some", 1, rows))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path):
    rows = [Row("a", 1.0, goal=1.2, noise=0.1, detail="x"), Row("b", None, failed=True, figure="some")]
    assert read(written(tmp_path / "r.json", *rows)) == rows


def test_a_file_of_an_earlier_version_is_read(tmp_path):
    row = {"what": "a", "value": 1, "unit": "", "goal": None, "exact": False, "detail": "", "noise": None}
    (tmp_path / "r.json").write_text(json.dumps({"rows": [row | {"met": "", "later": [1]}]}))
    assert read(tmp_path / "r.json") == [Row("a", 1, "")]


FOREIGN = {
    "no JSON": b"\x00\xff\x80",
    "cut off": b'{"rows": [{"what": "a", "val',
    "nested": b"[" * 200_000,
    "a list": b"[]",
    "other JSON": b'{"rows": 3}',
    "no rows": b'{"rows": []}',
    "a row that is none": b'{"rows": [7]}',
    "no value": b'{"rows": [{"what": "a"}]}',
    "a text as value": b'{"rows": [{"what": "a", "value": "1"}]}',
    "a truth as value": b'{"rows": [{"what": "a", "value": true}]}',
    "not a number": b'{"rows": [{"what": "a", "value": NaN}]}',
    "infinite noise": b'{"rows": [{"what": "a", "value": 1, "noise": Infinity}]}',
    "negative noise": b'{"rows": [{"what": "a", "value": 1, "noise": -1}]}',
    "a huge number": b'{"rows": [{"what": "a", "value": 1' + b"0" * 400 + b"}]}",
    "a number of too many digits": b'{"rows": [{"what": "a", "value": ' + b"1" * 9000 + b"}]}",
    "a list as unit": b'{"rows": [{"what": "a", "value": 1, "unit": []}]}',
    "a text as truth": b'{"rows": [{"what": "a", "value": 1, "exact": "no"}]}',
    "terminal commands": b'{"rows": [{"what": "a\\u001b[2J", "value": 1}]}',
    "twice": b'{"rows": [{"what": "a", "value": 1}, {"what": "a", "value": 0}]}',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_another_file_is_refused_in_one_sentence(content, tmp_path):
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"is no result file of `--json`: .") as caught:
        read(tmp_path / "r.json")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe"):
        with pytest.raises(ValueError, match=r"is no result file of `--json`: .") as caught:
            read(path)
        assert str(caught.value).isprintable()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="bytes, more than"):
        read(tmp_path / "large")


def test_the_command_shows_both_and_exits_with_1_where_one_grew(tmp_path):
    old, new, missed = [
        written(tmp_path / f"{name}.json", Row("a ratio", value, goal=1.2, noise=0.01))
        for name, value in (("old", 1.0), ("new", 1.1), ("missed", 1.3))
    ]

    def run(*arguments):
        command = [sys.executable, "-m", "tests.benchmarks", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = run("--compare", old, new)
    assert (done.returncode, done.stderr) == (1, "")
    assert "a ratio" in done.stdout and "1.1 x" in done.stdout and "grew by 0.1" in done.stdout
    assert run("--compare", new, old).returncode == 0
    done = run("--compare", missed, missed)
    assert (done.returncode, "misses its goal of 1.2" in done.stdout) == (1, True)
    done = run("--compare", old, tmp_path / "none.json")
    assert (done.returncode, "no result file" in done.stderr) == (2, True)
    assert run("--compare", old, new, missed).returncode == 2
