"""accelerate-weight-norm-offload: layers with weight normalization under sequential offload."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

FIX_ID = "accelerate-weight-norm-offload"
SHOWS = r"not close|meta|device|NaN|nan"
STAYED = r"\d+ bytes stayed on the device"


def codec():
    torch.manual_seed(0)
    norm = torch.nn.utils.weight_norm
    return torch.nn.Sequential(
        norm(torch.nn.Conv1d(4, 8, 3)), torch.nn.ELU(), norm(torch.nn.Conv1d(8, 4, 3))
    ).eval()


def run(model, device):
    with torch.no_grad():
        sound = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
        return model(sound.to(device)).cpu()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_under_offload(gpu):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    device = gpu.devices[0]
    expected = run(codec().to(device), device)
    before = gpu.allocated(device)
    model = cpu_offload(codec(), spelled(device))

    def check(output):
        torch.testing.assert_close(output, expected)
        assert gpu.allocated(device) == before, "weights stayed on the device"

    for _ in range(2):
        check(run(model, device))
    assert_goes_on(lambda: run(model, device), check)
    remove_hook_from_submodules(model)
    torch.testing.assert_close(run(model.to(device), device), expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_audio_autoencoder(gpu):
    from accelerate import cpu_offload
    from diffusers import AutoencoderOobleck

    def made():
        torch.manual_seed(0)
        return AutoencoderOobleck(
            encoder_hidden_size=8, decoder_channels=8, decoder_input_channels=4, downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
        ).eval()  # fmt: skip

    def decode(model):
        with torch.no_grad():
            latents = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1)).to(device)
            return model.decode(latents).sample.cpu()

    device = gpu.devices[0]
    expected = decode(made().to(device))
    offloaded = cpu_offload(made(), spelled(device))
    for _ in range(2):
        torch.testing.assert_close(decode(offloaded), expected)


@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_model_offload_takes_the_computed_weights_along(gpu):
    from accelerate import cpu_offload_with_hook

    device = gpu.devices[0]
    expected = run(codec().to(device), device)
    before = gpu.allocated(device)
    model, hook = cpu_offload_with_hook(codec(), spelled(device))

    def check(output):
        torch.testing.assert_close(output, expected)
        hook.offload()
        stayed = gpu.allocated(device) - before
        assert not stayed, f"{stayed} bytes stayed on the device"
        torch.testing.assert_close(run(model.to("cpu"), "cpu"), run(codec(), "cpu"))

    for _ in range(2):
        check(run(model, device))
    assert_goes_on(lambda: run(model, device), check)
