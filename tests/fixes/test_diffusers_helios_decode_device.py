"""diffusers-helios-decode-device: the last step of modular Helios where a components manager offloads."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.modular_pipelines.helios", reason="modular Helios came with diffusers 0.38")

FIX_ID = "diffusers-helios-decode-device"
SHOWS = r"on the same device|different device|is on cpu"


@pytest.fixture
def helios():
    from diffusers_quantfix.verify.models import helios

    return helios


def whole(helios, device):
    pipe = helios.pipeline()
    pipe.to(device)
    return pipe


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_components_manager(gpu, helios):
    from diffusers import ComponentsManager

    device = gpu.devices[0]
    expected = helios.video(whole(helios, device), device)
    before = gpu.allocated(device)
    manager = ComponentsManager()
    pipe = helios.pipeline(manager)

    def same(output):
        assert torch.equal(output, expected)

    for _ in range(2):
        manager.enable_auto_cpu_offload(device=spelled(device), memory_reserve_margin="1000000GB")
        for _ in range(2):
            same(helios.video(pipe, device))
        assert_goes_on(lambda: helios.video(pipe, device), same)
        manager.disable_auto_cpu_offload()
        assert pipe.vae.device.type == "cpu"
        assert gpu.allocated(device) == before, "weights stayed on the device"
    assert torch.equal(helios.video(whole(helios, device), device), expected)


def test_model_offload_and_the_state_that_it_gives_back(gpu, helios):
    device = gpu.devices[0]
    pipe = whole(helios, device)
    state = pipe(latent_chunks=[torch.zeros(1, 2, 1, 2, 2, device=device)], num_frames=1, output_type="pt")
    assert state.get("videos").shape == (1, 1, 3, 16, 16)
    assert pipe.vae.device == device
