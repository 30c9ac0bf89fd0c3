"""What the doctor knows of optimum-quanto."""

from __future__ import annotations

import pytest

from diffusers_quantfix.advisories import quanto as quanto_advice
from diffusers_quantfix.fixes import DISTRIBUTIONS, OPTIONS


@pytest.mark.parametrize(
    ("platform", "kind", "quanto", "diffusers", "words"),
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
def test_what_is_said_where(monkeypatch, platform, kind, quanto, diffusers, words) -> None:
    monkeypatch.setattr(quanto_advice.sys, "platform", platform)
    said = quanto_advice.advice({"optimum-quanto": quanto, "diffusers": diffusers, "torch": "2.13.0"}, kind)
    assert len(said) == len(words)
    for sentence, word in zip(said, words, strict=True):
        assert word in sentence and not sentence.endswith(".")


def test_nothing_without_quanto() -> None:
    assert quanto_advice.advice({"torch": "2.13.0", "diffusers": "0.42.1"}, "cuda") == []


def test_the_table_is_well_formed() -> None:
    for platform, _, claims, sentence in quanto_advice.ADVICE:
        assert platform in ("", "win32", "linux", "darwin")
        assert set(claims) <= set(DISTRIBUTIONS)
        for word in sentence.split():
            if "quanto:" in word:
                assert word.strip(";,").rpartition("=")[2] in OPTIONS
