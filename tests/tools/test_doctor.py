"""`doctor`: on this machine, and on boards that a broken stack would give."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from diffusers_quantfix.commands import doctor
from diffusers_quantfix.engine.board import Answer, Board


def board(*answers: tuple[str, str, str]) -> Board:
    made = [
        Answer(id, f"title of {id}", "lib.mod", {"lib": ""}, (), state, reason)
        for id, state, reason in answers
    ]
    return Board(made, {"torch": "2.0", "diffusers": None}, {}, ())


def test_a_library_that_cannot_be_imported_is_said_once():
    reason = "diffusers is installed but cannot be imported: ImportError: no such name"
    found = doctor.examine(
        board(("a", "waiting", reason), ("b", "waiting", reason), ("c", "failed", "its probe failed"))
    )
    assert found["problems"] == [reason, "c is failed: its probe failed"]


def test_upgrades_name_what_they_retire():
    found = doctor.examine(
        board(("bnb-quant-state-code", "applied", "mended"), ("bnb-linear8bit-move", "applied", "mended"))
    )
    assert found["upgrades"] == {"bitsandbytes 0.45.3": ["bnb-quant-state-code"]}
    assert found["not_healed"] == ["bnb-linear8bit-move"]
    assert found["problems"] == []


def test_a_candidate_is_a_note_and_no_problem():
    found = doctor.examine(board(("a", "candidate", "the defect seems to be there")))
    assert found["problems"] == []
    assert any("the defect seems to be there" in note for note in found["notes"])


@pytest.mark.parametrize("strict", [False, True])
def test_strict_fails_where_there_is_a_problem(monkeypatch, capsys, strict):
    monkeypatch.setattr(doctor, "status", lambda: board(("a", "failed", "its probe failed")))
    options = type("Options", (), {"json": False, "strict": strict})
    assert doctor.run(options) == (1 if strict else 0)
    assert "a is failed: its probe failed" in " ".join(capsys.readouterr().out.split())


def test_on_this_machine():
    command = [sys.executable, "-m", "diffusers_quantfix", "doctor"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"installed", "problems", "mended", "upgrades", "not_healed", "accelerator", "activation"} <= set(
        found
    )
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert max(len(line) for line in shown.splitlines()) <= 80
