"""`verify`: the verdicts, a child that dies or hangs, and the real thing on what is installed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from diffusers_quantfix.fixes import INDEX
from diffusers_quantfix.verify import report, run, verify
from diffusers_quantfix.verify.child import case_module

ANSWER = {"id": "a-fix", "title": "a defect", "state": "applied", "reason": "mended in somelib 1.0"}


def event(kind: str, text: str = "text") -> dict[str, str]:
    return {"id": "a-fix", "event": kind, "text": text}


@pytest.mark.parametrize(
    ("before", "after", "verdict", "ok"),
    [
        ("defect", "right", report.MENDED, True),
        ("defect", "defect", report.NOT_MENDED, False),
        ("right", "right", report.NOT_SHOWN, False),
        ("right", "defect", report.NOT_MENDED, False),
        ("cannot show", "cannot show", report.CANNOT_SHOW, True),
    ],
)
def test_a_fix_that_applies_is_judged_by_both_runs(before, after, verdict, ok):
    line = run._line(ANSWER, event(before), event(after))
    assert (line.verdict, line.ok) == (verdict, ok)


@pytest.mark.parametrize(
    ("state", "verdict", "ok"),
    [
        ("out-of-range", report.NOT_NEEDED, True),
        ("failed", report.NOT_MENDED, False),
        ("waiting", report.NOT_MENDED, False),
    ],
)
def test_a_fix_that_was_not_run_is_judged_by_its_state(state, verdict, ok):
    line = run._line({**ANSWER, "state": state}, None, None)
    assert (line.verdict, line.ok) == (verdict, ok)
    assert state in line.reason


CHILD = """
import json, os, sys, time
results, ids = sys.argv[1], sys.argv[2:]
with open(results, "a") as file:
    for fix_id in ids:
        print(json.dumps({"id": fix_id, "event": "begin", "text": ""}), file=file, flush=True)
        if fix_id == "dies":
            os.abort()
        if fix_id == "hangs":
            time.sleep(600)
        print(json.dumps({"id": fix_id, "event": "right", "text": os.environ["DIFFUSERS_QUANTFIX"]}), file=file)
"""


@pytest.fixture
def side(monkeypatch, tmp_path):
    """Run one side with a child of ours instead of the cases."""
    monkeypatch.setattr(
        run, "_command", lambda results, work, ids: [sys.executable, "-c", CHILD, results, *ids]
    )
    steps: list[int] = []

    def go(*ids: str) -> dict[str, dict[str, str]]:
        found = run._side("off", list(ids), str(tmp_path / "side"), steps.append)
        assert sum(steps) == len(ids), "the progress bar ends full"
        return found

    return go


def test_a_case_that_kills_its_process_costs_only_itself(side):
    found = side("first", "dies", "last")
    assert found["first"]["event"] == found["last"]["event"] == "right"
    assert found["last"]["text"] == "off", "the child has the setting of its side"
    assert found["dies"]["event"] == "defect"
    assert "exit code -6" in found["dies"]["text"]


def test_a_case_that_hangs_ends_with_the_time_limit(side, monkeypatch):
    monkeypatch.setattr(run, "TIME_LIMIT", 1.0)
    found = side("first", "hangs")
    assert found["first"]["event"] == "right"
    assert "no end in sight" in found["hangs"]["text"]


def test_an_unknown_id_is_one_sentence():
    with pytest.raises(ValueError, match="no fix is called 'no-such-fix'"):
        verify(["no-such-fix"])
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "verify", "no-such-fix"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no fix is called 'no-such-fix'" in done.stderr


@pytest.mark.parametrize("fix_id", sorted(INDEX))
def test_every_fix_has_a_case(fix_id):
    assert callable(importlib.import_module(case_module(fix_id)).case)


def test_every_defect_that_applies_here_is_mended():
    """The main job, as a user runs it; red without the package, right with it."""
    pytest.importorskip("torch", reason="the stack is not installed: nothing to verify")
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "verify", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)
    wrong = [line for line in found["fixes"] if line["verdict"] in (report.NOT_MENDED, report.NOT_SHOWN)]
    assert not wrong, wrong
    assert done.returncode == 0
    assert any(line["verdict"] == report.MENDED for line in found["fixes"])
    for line in found["fixes"]:
        if line["verdict"] == report.MENDED:
            assert line["before"] and line["after"] and line["before"] != line["after"]
