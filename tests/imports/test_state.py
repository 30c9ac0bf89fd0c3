"""A program that only imports the package can tell it in no thread, at no moment and in no child."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.imports.state import KINDS

pytest.importorskip("diffusers", reason="the stack is not installed: there is nothing to patch")

# What differs in a child of any process.
OF_A_CHILD = {"threads", "open files", "random numbers of Python"}


def told(module: str, *arguments: str, package: str = "") -> dict:
    """What a module of this folder prints, run in a new process with the package or without it."""
    environment = {**os.environ, "DIFFUSERS_QUANTFIX": package, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-B", "-W", "ignore", "-m", f"tests.imports.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_another_thread_and_children_see_no_change():
    assert len(KINDS) >= 35
    without, with_it = (told("watched", "1", package=package) for package in ("off", ""))
    assert (without["applied"], with_it["applied"] > 0) == (0, True)
    # The libraries change some of it themselves.
    mine = {kind: values for kind, values in with_it["changes"].items() if kind not in without["changes"]}
    assert mine == {}
    assert len(with_it["children"]) == len(without["children"])
    expected = OF_A_CHILD | set(without["changes"])
    assert [kinds for kinds in with_it["children"] if not set(kinds) <= expected] == []


@pytest.mark.thorough
def test_no_setter_of_process_wide_state_is_called():
    found = told("setters")
    assert found["applied"] > 0
    assert found["calls"] == []
    assert len(found["hooked"]) > 50
    seen = {call.split()[0] for call in found["pretended"]}
    assert seen >= set(found["hooked"]), "a hook that sees nothing proves nothing"


@pytest.mark.thorough
def test_probes_answer_as_in_a_new_process_and_leave_no_trace():
    found = told("probed", package="off")
    expected = found["a new process"]["answers"]
    assert "True" in expected.values()
    for state, outcome in found.items():
        answers = outcome["answers"]
        assert {name: answer for name, answer in answers.items() if answer != expected[name]} == {}, state
        assert outcome["changed"] == [], state
