"""`doctor`: on this machine, and on boards that a broken stack would give."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from importlib import metadata

import pytest
from packaging.version import Version

from diffusers_quantfix.advisories import combinations, machine, quantizers, supported
from diffusers_quantfix.commands import doctor
from diffusers_quantfix.engine.board import Answer, Board
from diffusers_quantfix.fixes import NAMES
from tests.upstream.cells import read


def board(*answers: tuple[str, str, str]) -> Board:
    made = [
        Answer(id, f"title of {id}", "lib.mod", {"lib": ""}, (), state, reason)
        for id, state, reason in answers
    ]
    return Board("1.0", made, {"torch": "2.0", "diffusers": None}, {}, ())


def test_a_library_that_cannot_be_imported_is_said_once():
    reason = "diffusers is installed but cannot be imported: ImportError: no such name"
    found = doctor.examine(
        board(("a", "waiting", reason), ("b", "waiting", reason), ("c", "failed", "its probe failed"))
    )
    assert found["problems"] == [reason, "c is failed: its probe failed"]


def test_upgrades_name_what_they_retire(monkeypatch):
    monkeypatch.setattr(doctor, "environment_pins", lambda: {"bitsandbytes": "==0.45.2"})
    found = doctor.examine(
        board(("bnb-quant-state-code", "applied", "patched"), ("bnb-linear8bit-move", "applied", "patched"))
    )
    (upgrade,) = found["upgrades"]
    assert upgrade["releases"] == {"bitsandbytes": "0.45.3"}
    assert upgrade["fixes"] == ["bnb-quant-state-code"]
    assert found["not_fixed"] == ["bnb-linear8bit-move"]
    assert found["problems"] == []


def test_a_candidate_is_no_problem():
    found = doctor.examine(board(("a", "candidate", "the bug seems to be present")))
    assert found["problems"] == []
    assert found["candidates"] == ["a: the bug seems to be present"]


def test_what_is_patched_above_its_claim_says_so():
    made = board(("a", "applied", "patched here"), ("b", "applied", "lib 3.0 is outside <=2.1, but"))
    assert doctor.examine(made)["same_code"] == {}
    assert "above the claimed range" not in printed(made)
    made["b"].same_code = True
    assert doctor.examine(made)["same_code"] == {"b": "lib 3.0 is outside <=2.1, but"}
    assert "1 of them above the claimed range, because the code is the same" in printed(made)
    every = " ".join(" ".join(doctor._lines(made, doctor.examine(made), every=True)).split())
    assert "b: title of b; lib 3.0 is outside <=2.1, but" in every


def printed(made: Board) -> str:
    return " ".join(" ".join(doctor._lines(made, doctor.examine(made))).split())


def test_candidates_stand_first():
    made = board(("a", "applied", "patched"), ("b", "candidate", "the bug seems to be present"))
    made.installed["lib"] = "9.0"
    assert printed(made).startswith("1 applied, 1 candidate candidate: b ")
    made.answers[1].above = True
    found = doctor.examine(made)
    known = "known bugs in releases newer than this version of the package supports: 1, see candidates"
    assert found["problems"] == [known]
    assert "lib 9.0: newer than this version of the package supports" in printed(made)
    assert printed(made).count("the bug seems to be present") == 1, "not among the problems again"


def test_a_release_that_was_not_tested_is_the_first_thing_said():
    """Before: nothing of it, "problems: none" and exit code 0."""
    newest = Version(supported.RELEASES["diffusers"][1])
    installed = {
        "diffusers": f"{newest.major}.{newest.minor + 1}.0.dev0",
        "torch": "99",
        "peft": "unreadable",
    }
    found = doctor.examine_versions() | {"installed": {**installed, "accelerate": None}}
    title, sentence, *_ = doctor._first_lines(found)
    assert title == "newer than tested" and f"diffusers {installed['diffusers']} is newer" in sentence
    assert doctor._first_lines(found | {"installed": {"diffusers": str(newest)}})[0] == "installed"


def test_an_unclaimed_release_that_is_patched_counts_as_patched():
    found = doctor.examine(board(("bnb-linear8bit-move", "applied (unclaimed release)", "patched")))
    assert list(found["patched"]) == ["bnb-linear8bit-move"]


def test_an_interpreter_without_the_libraries_is_named():
    made = board(("a", "missing", "lib is not installed"))
    said = printed(made)
    assert said.startswith("none of the libraries that are patched (lib) is installed for this interpreter, ")
    assert sys.executable in said
    assert "problems" not in said and "patched here" not in said
    assert doctor.examine_versions()["interpreter"] == sys.executable


INSTALLED = {"torch": "2.13.0+cpu", "diffusers": "0.33.1", "bitsandbytes": "0.45.2", "optimum-quanto": None}


def advice(kind: str, applied: str = "", **versions: str) -> str:
    made = board(("diffusers-cpu-only", applied, "")) if applied else board()
    made.installed = {**INSTALLED, **versions}
    return " ".join(machine.advice(made, kind))


def test_advice_for_a_machine_without_a_gpu():
    assert "bitsandbytes 0.45.2 quantizes on a GPU only" in advice("")
    assert "No GPU found. A GPU is needed for quantization." in advice("")
    assert "No GPU found" not in advice("", applied="applied", bitsandbytes="0.50.2")
    assert "quantizes on a GPU only" not in advice("", bitsandbytes="0.46.0")
    assert "quantizes on a GPU only" not in advice("cuda")


def test_a_quantizer_about_which_no_fix_is(monkeypatch):
    monkeypatch.setattr(quantizers, "installed_version", {"sdnq": "0.2.8"}.get)
    said = "sdnq 0.2.8: no fix is about the quantization method 'sdnq' alone; fixes about any quantized model cover it"
    assert f"{said}, like diffusers-controlnet-from-quantized; `audit`" in advice("")
    assert "count its tensors" in advice("")
    assert "auto-round" not in advice("")
    monkeypatch.setattr(quantizers, "installed_version", {"nvidia-modelopt": "0.33.0"}.get)
    assert "'modelopt'; `audit`, `release` and `track` were not tested with it" in advice("")


def test_the_fixes_that_cover_other_quantizers_are_there():
    assert {fix_id for _, _, fixes in quantizers.OTHERS.values() for fix_id in fixes} <= NAMES.keys()


def test_a_torch_and_a_python_that_were_not_tested(monkeypatch):
    assert "was tested" not in advice("")
    oldest, newest = supported.TORCH
    said = f"torch 2.4.1+cu121 is older than {oldest}, the oldest one that was tested; "
    assert said in advice("", torch="2.4.1+cu121")
    said = f"torch 2.99.0 is newer than {newest}, the newest one that was tested; "
    assert said in advice("cuda", torch="2.99.0")
    assert "was tested" not in advice("cuda", torch=f"{newest}+cu130") + advice("cuda", torch=oldest)
    assert "was tested" not in advice("", torch="unreadable")
    monkeypatch.setattr(machine.platform, "python_version", lambda: f"{supported.PYTHON[1]}.7")
    assert "was tested" not in advice("")
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.99.0rc1")
    assert (
        f"Python 3.99.0rc1 is newer than {supported.PYTHON[1]}, the newest one that was tested; "
        in advice("")
    )


def test_advice_for_intel_and_apple_gpus(monkeypatch):
    assert "0.48 and newer have" in advice("xpu")
    assert "official support" not in advice("xpu", bitsandbytes="0.48.0")
    assert "use 0.39 or newer" in advice("mps")
    assert "use 0.39 or newer" not in advice("mps", diffusers="0.39.0")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "no wheel for macOS" in advice("mps")
    assert "no wheel for macOS" not in advice("mps", bitsandbytes="0.49.0")


def test_advice_on_a_torch_that_cannot_see_the_gpu(monkeypatch):
    pytest.importorskip("torch", reason="the stack is not installed")
    monkeypatch.setattr(machine, "_torch_is_for_gpus", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "is built without CUDA, and this machine has an NVIDIA driver" in advice("")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "NVIDIA" not in advice("")
    monkeypatch.setattr(sys, "platform", "win32")
    assert "torch without CUDA for Windows" in advice("")


@pytest.mark.parametrize(
    ("library", "version", "says"),
    [
        (None, "0.45.2", "has no native library for the CUDA of this torch"),
        (types.SimpleNamespace(compiled_with_cuda=True), "0.45.2", ""),
    ],
)
def test_a_bitsandbytes_without_its_native_library(monkeypatch, library, version, says):
    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", types.SimpleNamespace(lib=library))
    assert ("native library" in advice("cuda", bitsandbytes=version)) == bool(says)
    assert says in advice("cuda", bitsandbytes=version)


@pytest.mark.parametrize(
    ("pins", "word"),
    [
        ({"diffusers": "==0.33.1", "transformers": "==5.23.0"}, "FLAX_WEIGHTS_NAME"),
        ({"diffusers": "==0.38.0", "transformers": "==4.46.3"}, "Dinov2WithRegistersConfig"),
        ({"diffusers": "==0.42.1", "transformers": "==4.57.6"}, "huggingface-hub"),
        ({"diffusers": "==0.36.0", "torchao": "==0.18.0"}, "torchao before 0.16"),
        ({"diffusers": "==0.37.1", "torchao": "==0.18.0"}, ""),
        ({"transformers": "==5.23.0", "bitsandbytes": "==0.45.5"}, "bitsandbytes>=0.46.1"),
        ({"bitsandbytes": "==0.45.2"}, "GLIBCXX_3.4.32"),
        ({"diffusers": "==0.42.1", "transformers": "==5.23.0", "bitsandbytes": "==0.50.2"}, ""),
        ({"diffusers": ">=0.30", "transformers": "==5.23.0"}, ""),
    ],
)
def test_releases_that_do_not_fit_together(pins, word):
    said = combinations.of_pins(pins)
    assert [word in sentence for sentence in said] == ([True] * len(said) if word else [])
    assert bool(said) == bool(word)


def test_every_cell_that_imports_is_free_of_combinations_that_do_not():
    """The release sets of the tests all import: a sentence that says otherwise of one of them would be wrong."""
    for cell in read().cells:
        said = " ".join(combinations.of_pins({name: f"=={version}" for name, version in cell.pins.items()}))
        assert "cannot be imported" not in said, cell.name


def test_what_the_packages_demand_of_each_other(monkeypatch):
    demands = {
        "diffusers": ["huggingface-hub<2,>=1", "absent", "torch>=1; extra == 'torch'", "!!"],
        "transformers": ["huggingface-hub<1"],
    }
    versions = {"diffusers": "0.42.1", "transformers": "4.57.6", "huggingface-hub": "0.36.0"}
    monkeypatch.setattr(metadata, "requires", lambda name: demands.get(name))
    monkeypatch.setattr(combinations, "installed_version", versions.get)
    assert combinations.declared() == [
        "diffusers 0.42.1 needs huggingface-hub <2,>=1, and 0.36.0 is installed",
        "diffusers 0.42.1 needs absent, which is not installed",
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_strict_fails_where_there_is_a_problem(monkeypatch, capsys, strict):
    said_before = []

    def status() -> Board:
        said_before.append(capsys.readouterr().out)
        return board(("a", "failed", "its probe failed"))

    monkeypatch.setattr(doctor, "status", status)
    options = type("Options", (), {"json": False, "strict": strict, "all": False})
    assert doctor.run(options) == (1 if strict else 0)
    assert "a is failed: its probe failed" in " ".join(capsys.readouterr().out.split())
    assert said_before[0].startswith("installed\n") and "\nactivation\n" in said_before[0], "as it is found"


@pytest.mark.long
def test_on_this_machine_as_text():
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_on_this_machine():
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", "doctor", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"installed", "problems", "combinations", "advice", "patched", "upgrades", "not_fixed"} <= set(
        found
    )
    assert found["combinations"] == [], "the environment of the tests fits together"
