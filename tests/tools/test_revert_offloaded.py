"""`revert` while a model is offloaded: nothing that it has is lost for good."""

from __future__ import annotations

import gc

import pytest

import diffusers_quantfix as qf
from tests.rig import models
from tests.tools.pipelines import flux


@pytest.fixture
def applied_again():
    yield
    qf.apply()


@pytest.mark.parametrize(
    ("bits", "mode", "stays"),
    [(4, "sequential", "bnb-quant-state-meta"), (8, "model", "bnb-linear8bit-move")],
)
def test_a_patch_without_which_a_live_model_would_be_damaged_stays(
    gpu, applied_again, tmp_path, bits, mode, stays
):
    """Before: "Cannot copy out of meta tensor; no data!" and "Expected all tensors to be on the same device", also
    after `apply`."""
    import torch

    if {answer.id: answer.state for answer in qf.status(load=False).answers}.get(stays) != "applied":
        pytest.skip(f"{stays} is not applied here")
    device = gpu.devices[0]
    pipeline = flux(tmp_path, bits)
    getattr(pipeline, f"enable_{mode}_cpu_offload")(device=device)
    wanted = models.call_flux(pipeline, device)
    for _ in range(2):
        board = {answer.id: answer for answer in qf.revert().answers}
        assert board[stays].state == "applied" and "not removed by revert(): " in board[stays].reason
        assert torch.equal(models.call_flux(pipeline, device), wanted)
        qf.apply()
        assert torch.equal(models.call_flux(pipeline, device), wanted)
    del pipeline
    gc.collect()
    assert {answer.id: answer.state for answer in qf.revert().answers}[stays] == "disabled"
    assert {answer.id: answer.state for answer in qf.apply().answers}[stays] == "applied"
