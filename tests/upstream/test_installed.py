"""Every fix meets what it expects in the libraries that are installed, before a release set runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.trees import ROOT
from tests.upstream import ordinary
from tests.upstream.verdict import drift


def test_no_fix_drifts(tmp_path):
    report = tmp_path / "report.json"
    subprocess.run(
        [sys.executable, "-m", "tests.upstream.inspect_fixes", str(report)],
        env={**os.environ, "DIFFUSERS_QUANTFIX": "off"},
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    found = json.loads(report.read_text())
    faults = {fix_id: drift(said) for fix_id, said in found.items() if drift(said)}
    assert not faults
    narrow = {
        fix_id: said["why"]
        for fix_id, said in found.items()
        if said["claim"] == "out-of-range" and said["probe"] == "broken"
    }
    assert not narrow, "the claim is too narrow, or the probe wrong"
    assert any(said["slots"] for said in found.values()), "nothing was patched"


@pytest.mark.long
def test_no_fix_fails_in_an_ordinary_program():
    assert ordinary.failures() == []
