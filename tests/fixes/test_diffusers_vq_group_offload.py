"""diffusers-vq-group-offload: a VQModel in every mode of group offloading."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models import vq
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import assert_allowed, modes

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")

FIX_ID = "diffusers-vq-group-offload"
SHOWS = "does not support group offloading"


KINDS = pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="Latent Diffusion"),
        pytest.param({"lookup_from_codebook": True}, id="Amused", marks=pytest.mark.long),
        pytest.param({"norm_type": "spatial"}, id="Kandinsky"),
    ],
)


@KINDS
@modes()
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_every_way(gpu, mode, options):
    assert_allowed(gpu, mode, lambda: vq.autoencoder(**options), vq.run)


@KINDS
def test_under_sequential_offload(gpu, options):
    from accelerate import cpu_offload

    device = gpu.devices[0]
    expected = vq.run(vq.autoencoder(**options).to(device), device)
    model = vq.autoencoder(**options)
    cpu_offload(model, device)
    assert torch.equal(vq.run(model, device), expected)
