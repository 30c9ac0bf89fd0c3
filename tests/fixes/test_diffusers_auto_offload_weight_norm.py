"""diffusers-auto-offload-weight-norm: weight normalization under the components manager."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import audio
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

FIX_ID = "diffusers-auto-offload-weight-norm"
NEEDS = "diffusers>=0.35"
STAYED = r"\d+ bytes stayed on the device"


def run(model, device):
    with torch.no_grad():
        sound = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1))
        return model(sound.to(device), sample_posterior=False).sample.cpu()


@pytest.mark.defect(FIX_ID, shows=STAYED, needs=NEEDS)
def test_nothing_stays(gpu):
    from diffusers import ComponentsManager

    device = gpu.devices[0]
    expected = run(audio.oobleck().to(device), device)
    before = gpu.allocated(device)
    manager, model = ComponentsManager(), audio.oobleck()
    manager.add("codec", model)
    manager.enable_auto_cpu_offload(device=spelled(device))

    def run_and_offload():
        output = run(model, device)
        manager.model_hooks[0].offload()
        return output

    def right(output):
        assert torch.equal(output, expected)
        stayed = gpu.allocated(device) - before
        assert stayed <= 0, f"{stayed} bytes stayed on the device"

    for _ in range(2):
        right(run_and_offload())
    assert_goes_on(run_and_offload, right)
    run(model, device)
    manager.disable_auto_cpu_offload()
    stayed = gpu.allocated(device) - before
    assert stayed <= 0, f"{stayed} bytes stayed on the device"
    assert torch.equal(run(model.to(device), device), expected)
