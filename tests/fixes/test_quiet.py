"""The libraries tell a program with the package what they tell it without, and import no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, importlib
import diffusers_quantfix
from diffusers_quantfix.fixes.targets import TARGETS
for target in sorted({target.module for target in TARGETS.values()}):
    with contextlib.suppress(Exception):
        importlib.import_module(target)
states = {fix.state for fix in diffusers_quantfix.status(load=False)}
print("applied" in states)
"""


def _told(package: str) -> tuple[str, list[str]]:
    """What the program prints, and what it writes to stderr, without the numbers of times and processes."""
    # With the first product of numbers MKL reads its settings, and then it prints: the program may set them later.
    environment = {**os.environ, "DIFFUSERS_QUANTFIX": package, "HF_HUB_OFFLINE": "1", "MKL_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", PROGRAM],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip(), sorted(re.sub(r"[\d:.]+", "", line) for line in done.stderr.splitlines())


@pytest.mark.thorough
def test_the_probes_and_patches_log_and_warn_of_nothing():
    pytest.importorskip("diffusers", reason="the stack is not installed: there is nothing to patch")
    (applied, with_it), (off, without) = _told(""), _told("off")
    assert (applied, off) == ("True", "False")
    assert [line for line in with_it if line not in without] == []


def test_importing_accelerate_imports_no_compiler():
    """It took seconds longer with such a probe: accelerate 1.15 leaves torch._dynamo to the first call of a hook."""
    pytest.importorskip("accelerate")
    answers = []
    for first in ("", "import diffusers_quantfix; "):
        program = f"{first}import accelerate, sys; print('torch._dynamo' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        answers.append(done.stdout)
    assert answers[0] == answers[1]
