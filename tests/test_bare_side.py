"""The other side of every fix's test: without the package the defect shows, with upstream's own error.

`tests.sides` says how; this run is a process of its own, since a library cannot be unpatched for a test.  The
project's own check runs this side on every release set of its own, the newest among them.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest


@pytest.mark.whole
def test_without_the_package_every_defect_shows_where_its_gate_says_so():
    pytest.importorskip("torch", reason="the stack is not installed: there is nothing to show a defect")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/fixes",
        "--side",
        "bare",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    print(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-6000:]
