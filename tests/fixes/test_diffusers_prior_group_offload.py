"""diffusers-prior-group-offload: the latents of a prior are scaled after its last pass."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import modes, offload, stop

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-prior-group-offload"
SHOWS = "Expected all tensors to be on the same device"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@modes()
def test_latents_are_scaled_after_a_pass(gpu, mode):
    from diffusers_quantfix.verify.models import prior

    device = gpu.devices[0]
    expected = prior.scaled(prior.tiny().to(device), device)
    before = gpu.allocated(device)
    model = prior.tiny()
    offload(model, device, mode)

    def same(output):
        assert output.device == device
        assert torch.equal(output, expected)
        del output
        stayed = gpu.allocated(device) - before - expected.nbytes
        assert stayed <= 0, f"{stayed} bytes stayed on the device"

    for _ in range(2):
        same(prior.scaled(model, device))
    assert_goes_on(lambda: prior.scaled(model, device), same)
    stop(model)
    assert torch.equal(prior.scaled(model.to(device), device), expected)


def test_where_it_is(gpu):
    from diffusers_quantfix.verify.models import prior

    model = prior.tiny().to(gpu.devices[1])
    assert prior.scaled(model, gpu.devices[1]).device == gpu.devices[1]
