"""diffusers-ledits-devices: LEdits++ under model offload; group offload is right without the fix, and stays so."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import LEAF, STREAM, offload
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

PLAIN, XL = "LEditsPPPipelineStableDiffusion", "LEditsPPPipelineStableDiffusionXL"
SHOWS = r"should be the same|on the same device|is on cpu"
each_pipeline = pytest.mark.parametrize(
    "name",
    [
        pytest.param(PLAIN, marks=pytest.mark.defect("diffusers-ledits-device", shows=SHOWS)),
        pytest.param(XL, marks=pytest.mark.defect("diffusers-ledits-xl-device", shows=SHOWS)),
    ],
)


def check(gpu, name, place):
    from diffusers_quantfix.verify.models import ledits

    device = gpu.devices[0]
    expected = ledits.encoded(ledits.pipeline(name).to(device)).cpu()
    pipe = ledits.pipeline(name)
    assert pipe.device.type == "cpu"
    place(pipe, device)

    def run():
        return ledits.encoded(pipe).cpu()

    def same(output):
        assert torch.equal(output, expected)

    for _ in range(2):
        same(run())
    assert_goes_on(run, same)
    return pipe


@each_pipeline
def test_model_offload(gpu, name):
    before = gpu.allocated(gpu.devices[0])
    pipe = check(gpu, name, lambda pipe, device: pipe.enable_model_cpu_offload(device=spelled(device)))
    pipe.maybe_free_model_hooks()
    assert gpu.allocated(gpu.devices[0]) == before, "weights stayed on the device"
    pipe.remove_all_hooks()
    assert pipe.device.type == "cpu"


@pytest.mark.parametrize("name", [PLAIN, XL])
@pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="group offloading came with 0.33")
@pytest.mark.parametrize("mode", [LEAF, LEAF | STREAM], ids=["leaf", "stream"])
def test_group_offload(gpu, name, mode):
    def place(pipe, device):
        for model in (pipe.vae, pipe.unet):
            offload(model, device, mode)

    check(gpu, name, place)


@pytest.mark.parametrize("name", [PLAIN, XL])
def test_other_placements(gpu, name):
    from diffusers_quantfix.verify.models import ledits

    pipe, device = ledits.pipeline(name), gpu.devices[-1]
    assert pipe.to(device).device == device
    assert pipe.to("cpu").device.type == "cpu"
    pipe.enable_sequential_cpu_offload(device=device)
    assert pipe.device == device
