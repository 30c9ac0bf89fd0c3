"""The recorded code on which the fixes were proved, against the installed releases and against faked newer ones."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from diffusers_quantfix.fixes import TESTED
from diffusers_quantfix.fixes.targets import TARGETS

from .proved_code import DATA
from .run_cell import ROOT
from .time_machine import FILE, KEPT_AWAY, RIGHT, WRONG

RECORDED = json.loads(DATA.read_text(encoding="utf-8"))
SHOW = """
import importlib, json, logging, sys
import diffusers_quantfix as qf
import diffusers, transformers
board = qf.status()
print("BOARD" + json.dumps({"ok": board.ok, "states": {a.id: [a.state, a.same_code, a.reason] for a in board.targets}}))
"""


def installed_is_recorded() -> bool:
    return all(
        importlib.metadata.version(name) == release
        for name, release in RECORDED["releases"].items()
        if release
    )


needs_the_recorded = pytest.mark.skipif(
    not installed_is_recorded(),
    reason="other releases are installed than those in which the code was recorded",
)


def test_the_recorded_releases_are_the_newest_that_were_tested():
    for distribution, release in TESTED.items():
        if (
            distribution == "torch"
        ):  # of the README's environment: the code of a fix is the same in a newer one, or not
            continue
        assert RECORDED["releases"].get(distribution) == release, f"run {DATA.name}'s command: {distribution}"


def test_each_piece_has_a_mark_and_each_number_a_piece():
    assert all(RECORDED["pieces"].values())
    used = {number for numbers in RECORDED["targets"].values() for number in numbers}
    assert used == set(range(len(RECORDED["pieces"])))
    assert set(RECORDED["targets"]) <= set(TARGETS)


@needs_the_recorded
@pytest.mark.long
def test_what_applies_here_has_its_proof_and_the_code_is_the_installed(tmp_path):
    """Recorded anew: a new or changed fix relies on other code."""
    report = tmp_path / "report.json"
    recorder = [sys.executable, "-m", "tests.upstream.proved_code", "--report", str(report)]
    done = subprocess.run(recorder, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(report.read_text(encoding="utf-8"))
    names = list(RECORDED["pieces"])
    recorded = {
        target: [names[number] for number in numbers] for target, numbers in RECORDED["targets"].items()
    }
    command = "`python -m tests.upstream.proved_code --write`"
    assert found["fixes"] == recorded, f"{command} writes it anew"
    assert found["marks"] == RECORDED["pieces"], f"{command} writes it anew"


# ---------------------------------------------------------------------- a release of tomorrow


def board(folder: Path, settings: str = "") -> dict:
    """The board of a process that finds what is in ``folder`` first."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "HF_HUB_OFFLINE": "1",
    }
    environment["DIFFUSERS_QUANTFIX"] = settings
    done = subprocess.run(
        [sys.executable, "-B", "-c", textwrap.dedent(SHOW)],
        env=environment, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("BOARD")), "")
    assert line, done.stderr[-2000:]
    return json.loads(line.removeprefix("BOARD"))


def fake(folder: Path, distribution: str, version: str) -> None:
    """Metadata of another release, found before the real one."""
    home = folder / f"{distribution}-{version}.dist-info"
    home.mkdir()
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def edited(folder: Path, package: str, file: str, old: str, new: str) -> None:
    """A copy of an installed package, of links but for one file in which ``old`` is exchanged."""
    import importlib.util

    home = Path(importlib.util.find_spec(package).origin).parent
    shutil.copytree(
        home, folder / package, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    target = folder / package / file
    text = target.read_text(encoding="utf-8")
    assert text.count(old) == 1, (old, text.count(old))
    target.unlink()
    target.write_text(text.replace(old, new), encoding="utf-8")


@needs_the_recorded
@pytest.mark.long
def test_with_newer_numbers_on_the_same_code_the_fixes_stay(tmp_path):
    before = board(tmp_path)
    fake(tmp_path, "diffusers", "0.43.0")
    fake(tmp_path, "transformers", "5.99.0")
    after = board(tmp_path)
    applied = [name for name, (state, _, _) in before["states"].items() if state == "applied"]
    lost = {name: after["states"][name] for name in applied if after["states"][name][0] != "applied"}
    assert len(applied) > 100
    assert not lost, lost
    assert after["ok"]
    by_code = [name for name, (_, same_code, _) in after["states"].items() if same_code]
    assert len(by_code) > 60
    strict = board(tmp_path, "claimed")
    assert all(strict["states"][name][0] == "candidate" for name in by_code)


@needs_the_recorded
@pytest.mark.long
def test_one_changed_function_takes_its_fixes_alone_and_a_comment_takes_none(tmp_path):
    """A loop that is written in another way, a docstring and a comment."""
    fake(tmp_path, "diffusers", "0.43.0")
    file = "hooks/group_offloading.py"
    loop = "    while len(atoms) > 0:\n        parent_name"
    edited(tmp_path, "diffusers", file, loop, loop.replace("len(atoms) > 0", "atoms"))
    path = tmp_path / "diffusers" / file
    text = path.read_text(encoding="utf-8").replace(
        "    def _init_cpu_param_dict(self):\n",
        '    def _init_cpu_param_dict(self):\n        """New."""  # and this\n',
    )
    path.write_text(text, encoding="utf-8")
    after = board(tmp_path)
    candidates = {name for name, (state, _, _) in after["states"].items() if state == "candidate"}
    piece = "diffusers.hooks.group_offloading:_find_parent_module_in_module_dict"
    number = list(RECORDED["pieces"]).index(piece)
    assert candidates == {target for target, numbers in RECORDED["targets"].items() if number in numbers}
    assert "diffusers-group-offload-containers" in candidates
    assert not after["ok"]
    for name in candidates:
        assert f"since diffusers 0.42.1 {piece} has changed" in after["states"][name][2]


# ---------------------------------------------------------------------- the time machine


def counted(patch: bool | None = None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in json.loads(FILE.read_text(encoding="utf-8"))["counts"]:
        if patch is None or row["patch"] is patch:
            counts[row["outcome"]] = counts.get(row["outcome"], 0) + row["count"]
    return counts


def test_nothing_was_accepted_wrongly():
    data = json.loads(FILE.read_text(encoding="utf-8"))
    assert counted().get(WRONG, 0) == 0
    assert {row["outcome"] for row in data["same code, bug gone"]} <= {KEPT_AWAY}


def test_most_of_what_is_right_is_accepted():
    for patch, wanted in ((None, 0.85), (True, 0.95)):
        counts = counted(patch)
        stays = counts[RIGHT] + counts["not accepted"]
        assert stays > 300
        assert counts[RIGHT] / stays >= wanted
