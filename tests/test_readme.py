"""The README says what is there: its examples are what the tools print, its lists hold all that they list."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from diffusers_quantfix.__main__ import COMMANDS
from diffusers_quantfix.engine.board import STATES
from diffusers_quantfix.engine.settings import WORDS
from diffusers_quantfix.fixes import INDEX

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OUTPUTS = re.findall(r"<!-- output: (.*?) -->\n```text\n(.*?)\n```", README, re.DOTALL)


@pytest.mark.parametrize(
    ("call", "excerpt"),
    [
        # what imports the stack is slow, and says what it finds here
        pytest.param(call, excerpt, id=call, marks=() if call.startswith("check") else pytest.mark.thorough)
        for call, excerpt in OUTPUTS
    ],
)
def test_an_example_is_what_is_printed(call: str, excerpt: str):
    arguments, _, given = call.partition(" < ")
    if not arguments.startswith("check"):
        pytest.importorskip("bitsandbytes", reason="the stack is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_quantfix", *arguments.split()],
        input=given, capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    printed = re.sub(
        r"(?m)^(here|patches) .*\n( +.*\n)*", "", done.stdout
    )  # what depends on this environment
    position = 0
    for part in re.split(r"(?m)^\.\.\.\n?", re.sub(r"(?m)^(here|patches) .*\n( +.*\n)*", "", excerpt + "\n")):
        found = printed.find(part.strip("\n"), position)
        assert found >= 0, f"`{arguments}` does not print this any more:\n{part}"
        position = found + len(part.strip("\n"))


def test_there_are_examples():
    assert {call.split()[0] for call, _ in OUTPUTS} == {"check", "explain"}


def test_the_lists_are_complete():
    for command in COMMANDS:
        assert f"`{command}" in README, command
    for state in STATES:
        assert f"| {state} |" in README, state
    for word in (*WORDS, "skip:<id>", "only:<id>"):
        assert f"`{word}`" in README, word


def test_what_is_named_exists():
    for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
                for line in README.splitlines() if line.startswith("#")}  # fmt: skip
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        assert anchor in headings, anchor
    outside = re.sub(r"(?s)<!-- fixes:begin -->.*?<!-- fixes:end -->|```text.*?```", "", README)
    for name in re.findall(
        r"[`\":]((?:bnb|diffusers|accelerate|transformers|quanto)-[a-z0-9-]+)[`\"]", outside
    ):
        assert name in INDEX or name in ("diffusers-quantfix",), name


def test_the_programs_compile():
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")


def test_the_prose_fits_a_screen():
    for number, line in enumerate(README.splitlines(), 1):
        if not line.startswith(("|", "!", "python3.11", ".venv", "upstream ")):
            assert len(line) <= 120, f"README.md, line {number}"
