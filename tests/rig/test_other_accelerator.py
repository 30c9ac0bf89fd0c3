"""Offloading with the rig's devices under another accelerator's name: whatever says "cuda" for all of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rig
from tests.gate import unmet
from tests.rig import accelerator

ROOT = Path(__file__).parents[2]
FILES = (
    "test_diffusers_group_offload_disk_device.py", "test_diffusers_group_offload_guard.py",
    "test_diffusers_sequential_guard.py", "test_diffusers_spread_guard.py", "test_diffusers_gguf_sequential.py",
)  # fmt: skip


@pytest.mark.long
def test_the_tests_of_offloading_on_xpu():
    """Some of them; tests/rig/accelerator.py says how to run any."""
    if reason := rig.unavailable_reason():
        pytest.skip(reason)
    if reason := unmet("torch>=2.7"):
        pytest.skip(f"accelerate looks for XPU in newer torch only; {reason}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {accelerator.VARIABLE: "xpu", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-m",
        "not thorough and not whole",
    ]
    done = subprocess.run(
        [*command, *(f"tests/fixes/{name}" for name in FILES)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("PASSED") > 40 and "[xpu" in done.stdout and "[cuda" not in done.stdout


def test_another_name_is_refused():
    environment = os.environ | {accelerator.VARIABLE: "tpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "import tests.rig.accelerator"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"{accelerator.VARIABLE}=tpu is none of cuda, xpu" in done.stderr
