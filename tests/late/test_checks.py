"""Each check that runs late does fail where somebody does not wait: pipelines, programs and the soak."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests import rig
from tests.pipelines import check
from tests.pipelines.outcomes import EXACT
from tests.rig.fixtures import require_rig
from tests.soak import cycles
from tests.trees import ROOT

torch = pytest.importorskip("torch")

PROGRAM = """
import torch
import tests.programs.devices

stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    weight = torch.ones(100).pin_memory().to("cuda", non_blocking=True)
if {waits}:
    torch.cuda.current_stream().wait_stream(stream)
weight + 1
print("the last line")
"""


@pytest.fixture
def late():
    require_rig()
    with rig.devices(late=True):
        yield


def use(waits: bool):
    """The result of a weight that comes on a stream of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        weight = torch.ones(100).pin_memory().to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    weight.record_stream(torch.cuda.current_stream())
    return weight + 1


class Subject:
    def load(self, name):
        return torch.nn.Identity()

    def run(self, pipe):
        return [torch.ones(100) + 1]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.usefixtures("late")
def test_a_pipeline(waits, monkeypatch):
    """Nor is it upstream's, where the un-quantized one does not wait either."""

    def way(subject, name, pipe, placement, *devices):
        yield [use(waits).cpu()]

    monkeypatch.setattr(check, "reference", lambda subject, pipe, device: subject.run(pipe))
    devices = torch.device("cuda:0"), torch.device("cuda:1")
    quantized, plain = (check.Source(Subject(), name, devices, way).outcome("sequential") for name in "qp")
    if waits:
        assert quantized == plain == EXACT
    else:
        assert f"AssertionError: {rig.NOT_WAITED}, 1 times, first at " in quantized and "in use" in quantized
        assert not check._same_fault(quantized, plain)


@pytest.mark.long
@pytest.mark.parametrize("waits", [True, False])
def test_a_program(waits):
    require_rig()
    environment = {**os.environ, rig.LATE: "1", "PYTHONPATH": str(ROOT), "DIFFUSERS_QUANTFIX": "off"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(waits=waits)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert "the last line" in ended.stdout, ended.stderr
    assert ended.returncode == (0 if waits else 1), ended.stderr
    assert (rig.NOT_WAITED in ended.stderr) is not waits


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.usefixtures("late")
def test_the_soak(waits, monkeypatch, tmp_path):
    class Soak:
        def __init__(self, *_):
            """No models."""

        def warm_up(self, backends):
            """Nothing."""

        def device_bytes(self):
            return ""

        def tensors(self):
            return Counter()

        def cycle(self, plan):
            use(waits)
            return []

    monkeypatch.setattr(cycles, "Soak", Soak)
    plans: list = [None, None]
    if waits:
        assert cycles.run(None, tmp_path, [], plans, print) == []
    else:
        with pytest.raises(AssertionError, match=rig.NOT_WAITED):
            cycles.run(None, tmp_path, [], plans, print)
