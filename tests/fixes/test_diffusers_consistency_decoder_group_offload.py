"""diffusers-consistency-decoder-group-offload: a consistency decoder in every mode of group offloading."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import consistency
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import assert_allowed, modes

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-consistency-decoder-group-offload"
SHOWS = "does not support group offloading"


@modes()
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_every_way(gpu, mode):
    assert_allowed(gpu, mode, consistency.decoder, consistency.run)


def test_under_sequential_and_model_offload(gpu):
    from accelerate import cpu_offload, cpu_offload_with_hook

    device = gpu.devices[0]
    expected = consistency.run(consistency.decoder().to(device), device)
    for offload in (cpu_offload, cpu_offload_with_hook):
        model = consistency.decoder()
        kept = offload(model, device)
        for _ in range(2):
            assert torch.equal(consistency.run(model, device), expected)
        del kept
