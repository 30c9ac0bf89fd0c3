"""diffusers-dit-group-offload: DiT in every mode of group offloading, plain and quantized."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import dit
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import BLOCK, assert_allowed, modes
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-dit-group-offload"
SHOWS = "does not support group offloading"


@modes()
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_plain_one(gpu, mode):
    assert_allowed(gpu, mode, dit.transformer, dit.run)


@modes("block", "block-stream")
def test_larger_groups(gpu, mode):
    assert_allowed(gpu, mode | {"num_blocks_per_group": 2}, dit.transformer, dit.run)


# some releases cannot move an 8-bit model to the CPU without the package
@pytest.mark.parametrize("bits", [pytest.param(4, marks=pytest.mark.defect(FIX_ID, shows=SHOWS)), 8])
@modes("block", "leaf-stream", long=("leaf", "block-stream"))
def test_a_quantized_one(gpu, tmp_path, mode, bits):
    source = dit.transformer()
    models.saved(source, tmp_path)

    def build():
        return models.load_quantized(type(source), tmp_path, bits, dtype=torch.float16)

    assert_allowed(gpu, mode, build, dit.run)


def test_without_offload_nothing_is_added(gpu):
    """Nor under sequential offload, whose hooks are those of the embedding itself."""
    from accelerate import cpu_offload

    device = gpu.devices[0]
    expected = dit.run(dit.transformer().to(device), device)
    offloaded = dit.transformer()
    cpu_offload(offloaded, device)
    assert torch.equal(dit.run(offloaded, device), expected)


def test_it_trains(gpu):
    if sentence := unmet("torch>=2.8"):
        pytest.skip(f"diffusers-group-offload-backward does nothing before; {sentence}")
    device = gpu.devices[0]
    gradients = []
    for offloaded in (False, True):
        model = dit.transformer().requires_grad_(False)
        if offloaded:
            model.enable_group_offload(onload_device=device, **BLOCK)
        else:
            model.to(device)
        latents = torch.ones(1, 4, 8, 8, device=device, requires_grad=True)
        labels = torch.tensor([1], device=device)
        model(latents, torch.tensor([3], device=device), class_labels=labels).sample.sum().backward()
        gradients.append(latents.grad.cpu())
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0
