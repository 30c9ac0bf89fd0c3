"""How a failure is judged: it is upstream's only where the un-quantized pipeline fails alike, by itself."""

from __future__ import annotations

import pytest

from tests.pipelines import check
from tests.pipelines.outcomes import EXACT
from tests.rig import models


@pytest.mark.parametrize(
    ("said", "plain", "alike"),
    [
        ("ValueError: 4-bit", "ValueError: another", True),
        ("ValueError: 4-bit", "TypeError: another", False),
        ("ValueError: 4-bit", EXACT, False),
        ("differs by 0.1", "differs by 0.2", True),
        ("AssertionError: 64 bytes stayed on the device", "AssertionError: 64 bytes stayed on the device", True),
        ("AssertionError: 65 bytes stayed on the device", "AssertionError: 64 bytes stayed on the device", False),
        ("AssertionError: with the LoRA: differs by 0.1", "AssertionError: with the LoRA: differs by 1e-05", True),
        ("AssertionError: with the LoRA: differs by 0.1", "AssertionError: the LoRA has no effect", False),
    ],
)  # fmt: skip
def test_which_fault_is_upstreams(said, plain, alike):
    assert check._same_fault(said, plain) is alike


class Subject:
    """A plain pipeline, and one that holds its weights on a device, as 4-bit ones do."""

    def __init__(self, device):
        self.device = device
        self.quantized = {"transformer"}

    def load(self, name):
        pipe = models.flux_pipeline()
        pipe.set_progress_bar_config(disable=True)
        return pipe.to(self.device) if name == "held" else pipe

    def run(self, pipe):
        import torch

        return [models.call_flux(pipe, device=self.device, dtype=torch.float32).cpu()]


def test_what_another_pipeline_holds_does_not_count(rig_devices):
    torch = pytest.importorskip("torch")
    devices = torch.device("cuda:0"), torch.device("cuda:1")
    subject = Subject(devices[0])
    held, plain = (check.Source(subject, name, devices) for name in ("held", "plain"))
    assert "bytes stayed on the device" in plain.outcome("sequential")
    assert plain.outcome("sequential", beside=held) == EXACT
    assert held.pipe is not None, "it was let go in this process, too"
