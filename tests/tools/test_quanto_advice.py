"""What the doctor knows of optimum-quanto."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diffusers_quantfix.advisories import quanto
from diffusers_quantfix.fixes import DISTRIBUTIONS, OPTIONS


@pytest.mark.parametrize(
    ("platform", "kind", "version", "diffusers", "words"),
    [
        (
            "win32",
            "cuda",
            "0.2.7",
            "0.42.1",
            ["pip on Windows installs one without CUDA", "drops it with 1.0"],
        ),
        ("win32", "", "0.2.7", "0.42.1", ["pip on Windows installs one without CUDA", "drops it with 1.0"]),
        ("win32", "cuda", "0.2.6", "0.36.0", ["quanto:build", "bitsandbytes is the alternative"]),
        ("win32", "cuda", "0.2.5", "0.33.1", ["quanto:build", "0.2.6 or newer", "bitsandbytes"]),
        ("linux", "cuda", "0.2.7", "0.42.1", ["quanto:marlin", "drops it with 1.0"]),
        ("linux", "", "0.2.7", "0.42.1", ["drops it with 1.0"]),
        ("linux", "", "0.2.5", "0.31.0", ["drops it with 1.0"]),
        ("darwin", "mps", "0.2.6", "0.42.1", ["drops it with 1.0"]),
        ("darwin", "mps", "0.2.7", "0.42.1", ["lacks unpack.mm", "drops it with 1.0"]),
        ("linux", "", "0.2.7", "1.0.0", []),
        ("linux", "", "unreadable", "0.42.1", []),
    ],
)
def test_what_is_said_where(monkeypatch, platform, kind, version, diffusers, words) -> None:
    monkeypatch.setattr(quanto.sys, "platform", platform)
    said = quanto.advice({"optimum-quanto": version, "diffusers": diffusers, "torch": "2.13.0"}, kind)
    assert len(said) == len(words)
    for sentence, word in zip(said, words, strict=True):
        assert word in sentence and not sentence.endswith(".")


def test_without_setuptools(tmp_path) -> None:
    """The very error of the import, and the doctor's sentence, in a process that finds no setuptools."""
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed", exc_type=ImportError)
    program = """
import sys, types
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "setuptools":
            raise ModuleNotFoundError("No module named 'setuptools'", name="setuptools")
sys.meta_path.insert(0, Hidden())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "setuptools" else find_spec(name, *rest)
from diffusers_quantfix.advisories import quanto
print(*quanto.advice({"optimum-quanto": "0.2.7"}, ""), sep="\\n")
try:
    import optimum.quanto
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    sentence, error = done.stdout.splitlines()
    assert "install setuptools" in sentence and error in sentence, done.stderr[-2000:]
    assert not any("setuptools" in said for said in quanto.advice({"optimum-quanto": "0.2.7"}, ""))
    assert not any("setuptools" in said for said in quanto.advice({"torch": "2.5.1"}, ""))


def test_nothing_without_quanto() -> None:
    assert quanto.advice({"torch": "2.13.0", "diffusers": "0.42.1"}, "cuda") == []


def test_the_table_is_well_formed() -> None:
    for platform, _, claims, sentence in quanto.ADVICE:
        assert platform in ("", "win32", "linux", "darwin")
        assert set(claims) <= set(DISTRIBUTIONS)
        for word in sentence.split():
            if "quanto:" in word:
                assert word.strip(";,").rpartition("=")[2] in OPTIONS
