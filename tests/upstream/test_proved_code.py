"""The recorded code on which the fixes were proved, against the installed releases and against faked newer ones."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffusers_quantfix.engine import probe
from diffusers_quantfix.engine.errors import TargetMissing
from diffusers_quantfix.fixes import TESTED
from diffusers_quantfix.fixes.targets import TARGETS

from . import time_machine
from .cells import Cell
from .proved_code import DATA, OF_A_PROCESSOR, LookUps, recorded
from .results import Seen
from .run_cell import ROOT
from .time_machine import FILE, KEPT_AWAY, RIGHT, WRONG

RECORDED = json.loads(DATA.read_text(encoding="utf-8"))
NAMES = list(RECORDED["pieces"])
RELIES_ON = {target: sorted(pieces) for target, pieces in recorded().items()}


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
    assert {piece for pieces in RELIES_ON.values() for piece in pieces} == set(NAMES)
    assert set(RELIES_ON) <= set(TARGETS)


def test_what_only_some_processors_need_is_recorded_all_the_same():
    """Written anew on another processor, the file had lost them: `--write` keeps what it cannot find there."""
    assert set(RELIES_ON) >= OF_A_PROCESSOR


def test_the_pieces_of_a_module_stand_together():
    """`Proofs` finds them by the first one."""
    homes = [name.partition(":")[0] for name in NAMES]
    assert len([home for home, before in zip(homes, ["", *homes], strict=False) if home != before]) == len(
        {*homes}
    )


def test_what_is_not_there_is_no_piece():
    """Its absence would be taken for a change: `find` has nothing to compare."""
    with LookUps() as seen:
        with pytest.raises(TargetMissing):
            probe.resolve(json, "nothing_of_this_name")
        probe.resolve(json, "dumps")
    assert seen.places == [(json, "dumps")]


@needs_the_recorded
@pytest.mark.long
def test_what_applies_here_has_its_proof_and_the_code_is_the_installed(tmp_path):
    """Recorded anew: a new or changed fix relies on other code."""
    report = tmp_path / "report.json"
    recorder = [sys.executable, "-m", "tests.upstream.proved_code", "--report", str(report)]
    done = subprocess.run(recorder, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(report.read_text(encoding="utf-8"))
    command = "`python -m tests.upstream.proved_code --write`"
    assert found["fixes"] == RELIES_ON, f"{command} writes it anew"
    assert found["marks"] == RECORDED["pieces"], f"{command} writes it anew"


# ---------------------------------------------------------------------- a release of tomorrow


@dataclass
class Said:
    """What ``status`` says in an environment: its exit status, and target -> its part of the JSON."""

    status: int
    targets: dict[str, dict[str, Any]]

    def named(self, state: str) -> set[str]:
        return {name for name, answer in self.targets.items() if answer["state"] == state}


def board(folder: Path, settings: str = "") -> Said:
    """``status`` of an interpreter that finds what is in ``folder`` first."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "HF_HUB_OFFLINE": "1",
    }
    environment["DIFFUSERS_QUANTFIX"] = settings
    done = subprocess.run(
        [sys.executable, "-B", "-m", "diffusers_quantfix", "status", "--json"],
        env=environment, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[-2000:]
    fixes = json.loads(done.stdout)["fixes"]
    return Said(done.returncode, {answer["id"]: answer for fix in fixes for answer in fix["targets"]})


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
@pytest.mark.parametrize(
    "newer",
    [
        {"diffusers": "0.43.0", "transformers": "5.99.0"},
        {library: "99.0.dev0" for library in TESTED if library != "torch"},
    ],
    ids=("two", "every one"),
)
def test_with_newer_numbers_on_the_same_code_the_fixes_stay(tmp_path, newer):
    """All of them: some were decided while a package of quanto lacked a class, and PEFT most of its prefixes."""
    before = board(tmp_path)
    for library, version in newer.items():
        fake(tmp_path, library, version)
    after = board(tmp_path)
    applied = before.named("applied")
    assert len(applied) > 100
    assert not applied - after.named("applied")
    assert (before.status, after.status) == (0, 0)
    by_code = {name for name, answer in after.targets.items() if answer["same_code"]}
    assert len(by_code) > 60
    strict = board(tmp_path, "claimed")
    assert strict.named("candidate") == by_code
    assert strict.status == 1


@needs_the_recorded
@pytest.mark.long
def test_one_changed_function_takes_its_fixes_alone_and_a_comment_takes_none(tmp_path):
    """A loop that is written in another way; above it a docstring and a comment, which alone change nothing."""
    before = board(tmp_path)
    fake(tmp_path, "diffusers", "0.43.0")
    file = "hooks/group_offloading.py"
    head = "    def _init_cpu_param_dict(self):\n"
    edited(tmp_path, "diffusers", file, head, f'{head}        """New."""  # and this\n')
    commented = board(tmp_path)
    assert (commented.status, commented.named("candidate")) == (0, set())
    assert commented.named("applied") == before.named("applied")

    path = tmp_path / "diffusers" / file
    loop = "    while len(atoms) > 0:\n        parent_name"
    text = path.read_text(encoding="utf-8")
    assert text.count(loop) == 1
    path.write_text(text.replace(loop, loop.replace("len(atoms) > 0", "atoms")), encoding="utf-8")
    after = board(tmp_path)
    piece = "diffusers.hooks.group_offloading:_find_parent_module_in_module_dict"
    theirs = {target for target, pieces in RELIES_ON.items() if piece in pieces}
    assert "diffusers-group-offload-containers" in theirs
    assert after.named("candidate") == theirs
    assert after.named("applied") == before.named("applied") - theirs
    assert after.status == 1
    for name in theirs:
        assert f"since diffusers 0.42.1 {piece} has changed" in after.targets[name]["reason"]


# ---------------------------------------------------------------------- the time machine


def counted(patch: bool | None = None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in json.loads(FILE.read_text(encoding="utf-8"))["counts"]:
        if patch is None or row["patch"] is patch:
            counts[row["outcome"]] = counts.get(row["outcome"], 0) + row["count"]
    return counts


@pytest.mark.parametrize(
    ("marks", "states", "outcome"),
    [
        ("aab", ("patched", "patched", "healthy"), "noticed by the code"),
        ("aaa", ("patched", "patched", "healthy"), "kept away by the probe"),
        ("aaa", ("patched", "patched", ""), "wrong"),  # nobody looked
        ("aaa", ("patched", "patched", "patched"), "wrong"),
    ],
)
def test_a_step_over_the_end_of_a_claim(monkeypatch, marks, states, outcome):
    """Release 1 is below the claim ==2, release 3 above it; what is asked of it is known, or not."""
    cells = [Cell(f"C{release}", "3.11", {"lib": release}) for release in "123"]
    table = SimpleNamespace(every=cells, releases={"lib": list("123")})
    seen = {f"C{at}": Seen(state, "", "") for at, state in enumerate(states, 1) if state}
    monkeypatch.setattr(time_machine, "declarations", lambda: {"fix": {"claims": {"lib": "==2"}}})
    monkeypatch.setattr(time_machine, "load", lambda: {"fix": seen})
    read_marks = {("lib", release): {"lib:f": mark} for release, mark in zip("123", marks, strict=True)}
    rows = time_machine.steps(table, {"C2": {"fixes": {"fix": ["lib:f"]}}}, read_marks)
    assert [(row["before"], row["after"], row["outcome"]) for row in rows] == [
        ("2", "1", "below the claim"),
        ("2", "3", outcome),
    ]


def test_a_step_within_a_claim(monkeypatch):
    cells = [Cell("C2", "3.11", {"lib": "2"})]
    table = SimpleNamespace(every=cells, releases={"lib": list("123")})
    monkeypatch.setattr(time_machine, "declarations", lambda: {"fix": {"claims": {"lib": ">=1"}}})
    monkeypatch.setattr(time_machine, "load", lambda: {"fix": {"C2": Seen("patched", "", "")}})
    read_marks = {("lib", release): {"lib:f": mark} for release, mark in zip("123", "aab", strict=True)}
    rows = time_machine.steps(table, {"C2": {"fixes": {"fix": ["lib:f", "other:g"]}}}, read_marks)
    found = {(row["before"], row["after"]): (row["outcome"], row["seen"], row["changed"]) for row in rows}
    assert found == {
        ("1", "2"): (RIGHT, True, []),
        ("1", "3"): ("not accepted", False, []),
        ("2", "1"): (RIGHT, False, []),
        ("2", "3"): ("not accepted", False, ["lib:f"]),
        ("3", "1"): ("not accepted", False, []),
        ("3", "2"): ("not accepted", True, []),
    }


def test_nothing_was_accepted_wrongly():
    data = json.loads(FILE.read_text(encoding="utf-8"))
    assert counted().get(WRONG, 0) == 0
    pairs = data["pairs"]
    assert not [row for row in pairs if row["outcome"] == WRONG]
    for forward in (True, False):
        accepted = [row for row in pairs if row["forward"] is forward and row["outcome"] == RIGHT]
        assert sum(row["count"] for row in accepted) > 10000
        assert (
            sum(row["count"] for row in accepted if row["seen"]) > 5000
        )  # red without the package, green with it
    assert {row["outcome"] for row in data["same code, bug gone"]} <= {KEPT_AWAY}


def test_most_of_what_is_right_is_accepted():
    for patch, wanted in ((None, 0.85), (True, 0.95)):
        counts = counted(patch)
        stays = counts[RIGHT] + counts["not accepted"]
        assert stays > 300
        assert counts[RIGHT] / stays >= wanted
