"""`--json`: what was measured is never lost, never measured twice unasked, and a failure hides nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import measure
from tests.benchmarks.figure import FIGURES, Row
from tests.benchmarks.results import read


@pytest.fixture
def figures(monkeypatch):
    """Three figures that count how often they are measured, in the place of all others."""
    counts = dict.fromkeys(("one", "two", "three"), 0)

    def declare(name):
        def figure():
            counts[name] += 1
            yield Row(f"row of {name}", counts[name], goal=100)

        monkeypatch.setitem(FIGURES, name, figure)

    monkeypatch.setattr(command, "FIGURES", FIGURES)
    for name in list(FIGURES):
        monkeypatch.delitem(FIGURES, name)
    for name in counts:
        declare(name)
    monkeypatch.setattr(command, "_machine", lambda: {"versions": {"torch": "1"}, "text": "a machine"})
    return counts


def values(path):
    return {row.what: row.value for row in read(path)}


def test_the_file_is_complete_after_each_figure(figures, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    seen = []

    def looking():
        seen.append(values(path))
        yield Row("row of two", 1)

    monkeypatch.setitem(FIGURES, "two", looking)
    assert command.main(["--json", str(path)]) == 0
    assert seen == [{"row of one": 1}]
    assert values(path) == {"row of one": 1, "row of two": 1, "row of three": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_run_is_resumed(figures, tmp_path, monkeypatch, capsys):
    path = tmp_path / "r.json"
    with monkeypatch.context() as patch:

        def interrupted():
            yield Row("half of two", 1)
            raise KeyboardInterrupt

        patch.setitem(FIGURES, "two", interrupted)
        assert command.main(["--json", str(path)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert values(path) == {"row of one": 1}
    assert command.main(["--json", str(path)]) == 0
    assert values(path) == {"row of one": 1, "row of two": 1, "row of three": 1}
    assert "one: in" in capsys.readouterr().out


def test_again_measures_what_is_there_and_keeps_the_others(figures, tmp_path):
    path = str(tmp_path / "r.json")
    assert command.main(["--json", path, "--repeat", "3"]) == 0
    assert (figures["one"], values(tmp_path / "r.json")["row of one"]) == (3, 2)
    assert command.main(["one", "--json", path, "--again"]) == 0
    assert figures == {"one": 4, "two": 3, "three": 3}
    rows = {row.what: (row.value, row.noise) for row in read(tmp_path / "r.json")}
    assert rows == {"row of one": (4, None), "row of two": (2, 2), "row of three": (2, 2)}


def test_more_repeats_add_to_those_that_are_there(figures, tmp_path):
    path = str(tmp_path / "r.json")
    assert command.main(["one", "--json", path]) == 0
    assert command.main(["one", "--json", path, "--repeat", "3"]) == 0
    assert (figures["one"], values(tmp_path / "r.json")) == (3, {"row of one": 2})


def _waits():
    yield Row("first row", 1, goal=1)
    # As every figure does it: in a process.
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=True)


def _crashes():
    yield Row("first row", 1, goal=1)
    raise ZeroDivisionError("division by zero\nin two lines")


def _badly_ended():
    yield Row("first row", 1, goal=1)
    measure.processor_seconds([sys.executable, "-c", "raise SystemExit(3)"], measure.environment(), "/")


@pytest.mark.parametrize(
    ("figure", "says"),
    [
        (_waits, "out of time: more than 1.5 s"),
        (_crashes, "failed: ZeroDivisionError: division by zero"),
        (_badly_ended, "ended with 3"),
    ],
)
def test_a_figure_that_fails_loses_and_hides_nothing(figure, says, figures, tmp_path, monkeypatch, capsys):
    path = tmp_path / "r.json"
    with monkeypatch.context() as patch:
        patch.setitem(FIGURES, "two", figure)
        assert command.main(["--json", str(path), "--limit", "1.5"]) == 1
    rows = {row.what: row for row in read(path)}
    assert list(rows) == ["row of one", "first row", "two", "row of three"]
    assert [row.what for row in rows.values() if row.failed] == ["two"]
    assert says in rows["two"].detail
    printed = capsys.readouterr().out
    assert says in printed and "1 failed: two" in printed
    assert command.main(["--json", str(path)]) == 0, "what failed is measured again"
    assert (figures["one"], figures["two"], "two" in values(path)) == (1, 1, False)


def test_what_a_machine_cannot_show_is_no_failure(figures, tmp_path, monkeypatch):
    def refused():
        raise measure.CannotMeasure("needs a real GPU")
        yield

    monkeypatch.setitem(FIGURES, "two", refused)
    assert command.main(["--json", str(tmp_path / "r.json")]) == 0
    rows = {row.what: row for row in read(tmp_path / "r.json")}
    assert (rows["two"].failed, rows["two"].detail) == (False, "not measured: needs a real GPU")


def test_an_infinite_value_is_a_failure(figures, tmp_path, monkeypatch):
    monkeypatch.setitem(FIGURES, "two", lambda: (row for row in [Row("ratio", float("inf"))]))
    assert command.main(["--json", str(tmp_path / "r.json")]) == 1
    assert [row.what for row in read(tmp_path / "r.json") if row.failed] == ["ratio"]


def test_a_compared_figure_that_failed_is_named_with_what_is_gone(figures, tmp_path, monkeypatch, capsys):
    old = tmp_path / "old.json"
    assert command.main(["--json", str(old)]) == 0
    monkeypatch.setitem(FIGURES, "two", _crashes)
    capsys.readouterr()
    assert command.main(["--compare", str(old), "two"]) == 1
    table = capsys.readouterr().out.partition("before")[2].splitlines()
    assert [line.split("  ")[0] for line in table[1:-1]] == ["first row", "two", "row of two"]
    assert table[-2].endswith("gone")


@pytest.mark.parametrize(
    "content",
    [
        {"rows": [], "versions": {"torch": "1"}},
        {"rows": [], "versions": {"torch": "1"}, "measurements": [{"figure": "one", "turn": 0, "rows": []}]},
        {"rows": [], "versions": {"torch": "1"}, "measurements": [{"figure": 1, "turn": 1, "rows": []}]},
        {"rows": [], "versions": {"torch": "2"}, "measurements": []},
        ["another file"],
    ],
)
def test_a_file_that_cannot_be_resumed_is_left_as_it_is(content, figures, tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    with pytest.raises(SystemExit) as ended:
        command.main(["--json", str(path)])
    assert ended.value.code == 2
    assert "error: " + str(path) in capsys.readouterr().err
    assert (path.read_bytes(), figures["one"]) == (before, 0)


@pytest.mark.parametrize(
    "words", [["--again"], ["--limit", "0"], ["--limit", "nan"], ["--repeat", "0"], ["four"]]
)
def test_wrong_words_are_refused(words, figures):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert (ended.value.code, figures["one"]) == (2, 0)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(figures, tmp_path):
    with pytest.raises(SystemExit):
        command.main(["--json", str(tmp_path / "none" / "r.json")])
    assert figures["one"] == 0


def test_a_call_that_ends_its_process_does_not_lose_those_after_it():
    said = measure.children(
        [
            ("test_results:answers", 1),
            ("test_results:ends", 7),
            ("test_results:raises",),
            ("test_results:answers", 2),
        ],
        package=False,
    )
    assert (said[0], said[3]) == (1, 2)
    assert [type(one) for one in said[1:3]] == [measure.Failed, measure.Failed]
    assert "ended with 7" in str(said[1])
    assert str(said[2]) == "test_results:raises failed: KeyError: 'text'"
    with pytest.raises(measure.Failed, match="ended with 7"):
        measure.child("test_results:ends", 7, package=False)


def answers(number: int) -> int:
    return number


def ends(code: int) -> None:
    import os

    os._exit(code)


def raises() -> None:
    raise KeyError("text")
