"""diffusers-group-offload-buffers: group offloading with a stream leaves buffers on the GPU."""

from __future__ import annotations

import pytest

from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import assert_left, assert_works, assert_works_in_every_mode, modes, offload

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-group-offload-buffers"
STAYED = r"bytes stayed on cuda"

streams = modes("leaf-stream", "block-stream", "leaf-low", "block-low", "leaf-record", "block-record")


class Packed(torch.nn.Linear):
    """A layer whose weight is a buffer, as in the layouts of GPTQ; it counts its calls in another one."""

    def __init__(self, features: int = 64):
        super().__init__(features, features)
        weight = self.weight.data
        del self.weight
        self.register_buffer("weight", weight)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


def build(device):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(Packed(), torch.nn.BatchNorm1d(64), Packed()) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sequential(*blocks))
    return model.to(device).eval()


def run(model, device):
    with torch.no_grad():
        return model(torch.ones(2, 64, device=device)).cpu()


@streams
@pytest.mark.defect(FIX_ID, shows=STAYED)
def test_buffers_leave_the_device(gpu, mode):
    device = gpu.devices[0]
    assert_works(gpu, device, lambda: build(device), lambda model: run(model, device), mode)


@streams
def test_in_inference_mode_and_out_of_it(gpu, mode):
    device = gpu.devices[-1]
    assert_works_in_every_mode(gpu, device, lambda: build(device), lambda model: run(model, device), mode)


@streams
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.defect(FIX_ID, shows="written to")
def test_what_is_written_to_a_buffer_is_kept(gpu, mode, inference):
    device = gpu.devices[0]
    model = build(device)
    offload(model, device, mode)
    for _ in range(3):
        with torch.inference_mode(inference):
            run(model, device)
    calls = [module.calls.item() for module in model.modules() if isinstance(module, Packed)]
    assert calls == [3] * 6, f"written to the buffers: {calls}"


def test_unchanged_buffers_are_not_copied_back(rig_devices):
    device = rig_devices.devices[0]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))).eval()
    before = rig_devices.allocated(device)
    mode = {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True}
    offload(model, device, mode)
    run(model, device)
    rig_devices.reset()
    output = run(model, device)
    assert rig_devices.traffic().d2h == output.nbytes
    assert_left(rig_devices, device, before)
