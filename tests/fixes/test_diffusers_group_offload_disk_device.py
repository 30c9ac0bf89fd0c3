"""diffusers-group-offload-disk-device: group offloading from disk ignores the index of the device."""

from __future__ import annotations

import functools

import pytest

from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import (
    BLOCK,
    LEAF,
    STREAM,
    assert_works,
    assert_works_in_every_mode,
    offload,
    output,
    plain,
)
from tests.fixes.test_diffusers_group_offload_bnb import build, run
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.34")), reason="to disk from diffusers 0.34 on")

FIX_ID = "diffusers-group-offload-disk-device"
SHOWS = "found at least two devices, cuda:[01] and cuda:[01]"

plain_modes = pytest.mark.parametrize("mode", [LEAF, BLOCK], ids=["leaf", "block"])
modes = pytest.mark.parametrize(
    "mode",
    [LEAF, BLOCK, LEAF | STREAM, BLOCK | STREAM],
    ids=["leaf", "block", "leaf-stream", "block-stream"],
)


def other_device(gpu):
    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    return gpu.devices[1]


@plain_modes
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_runs_on_the_second_device(gpu, tmp_path, mode):
    device = other_device(gpu)
    expected = output(plain(device), device)
    model = plain("cpu")
    offload(model, device, mode | {"offload_to_disk_path": str(tmp_path)})
    assert torch.equal(output(model, device), expected)


@modes
@pytest.mark.parametrize("weights", ["plain", "4-bit", "8-bit"])
def test_nothing_is_left_and_nothing_goes_through_the_first_device(gpu, tmp_path, mode, weights):
    device, first = other_device(gpu), gpu.devices[0]
    make, run_it = (plain, output) if weights == "plain" else (functools.partial(build, weights), run)
    make(device)  # bitsandbytes makes its tables on the current device, once
    gpu.reset()
    before = gpu.peak(first)
    mode = mode | {"offload_to_disk_path": str(tmp_path)}
    assert_works(gpu, device, lambda: make(device), lambda model: run_it(model, device), mode)
    assert gpu.peak(first) == before


@plain_modes
def test_in_inference_mode_and_out_of_it(gpu, tmp_path, mode):
    device = other_device(gpu)
    mode = mode | {"offload_to_disk_path": str(tmp_path)}
    assert_works_in_every_mode(gpu, device, lambda: plain(device), lambda model: output(model, device), mode)
