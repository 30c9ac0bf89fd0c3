"""diffusers-ddpm-device: DDPM under model offload; the other placements are right without the fix, and stay so."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import LEAF, STREAM, offload
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

FIX_ID = "diffusers-ddpm-device"
SHOWS = r"on the same device|different device|is on cpu"


def check(gpu, place):
    from diffusers_quantfix.verify.models import ddpm

    device = gpu.devices[0]
    expected = ddpm.image(ddpm.pipeline().to(device))
    pipe = ddpm.pipeline()
    place(pipe, device)

    def same(output):
        assert torch.equal(output, expected)

    for _ in range(2):
        same(ddpm.image(pipe))
    assert_goes_on(lambda: ddpm.image(pipe), same)
    return pipe


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_model_offload(gpu):
    from diffusers_quantfix.verify.models import ddpm

    before = gpu.allocated(gpu.devices[0])
    pipe = check(gpu, lambda pipe, device: pipe.enable_model_cpu_offload(device=spelled(device)))
    pipe.maybe_free_model_hooks()
    assert gpu.allocated(gpu.devices[0]) == before, "weights stayed on the device"
    pipe.remove_all_hooks()
    assert pipe.device.type == "cpu"
    assert ddpm.image(pipe).shape == (1, 8, 8, 3)


@pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="group offloading came with 0.33")
@pytest.mark.parametrize("mode", [LEAF, LEAF | STREAM], ids=["leaf", "stream"])
def test_group_offload(gpu, mode):
    check(gpu, lambda pipe, device: offload(pipe.unet, device, mode))


def test_other_placements(gpu):
    from diffusers_quantfix.verify.models import ddpm

    pipe, device = ddpm.pipeline(), gpu.devices[-1]
    assert pipe.to(device).device == device
    assert pipe.to("cpu").device.type == "cpu"
    check(gpu, lambda pipe, device: pipe.enable_sequential_cpu_offload(device=spelled(device)))
