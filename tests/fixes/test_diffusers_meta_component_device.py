"""diffusers-meta-component-device: a sequentially offloaded diffusers model says that it is on meta."""

from __future__ import annotations

import sys

import pytest

from tests.fixes.callers import spelled
from tests.fixes.callers import without_index as without_index
from tests.fixes.offloaded import SHOWS, assert_plain_property, gligen, offload, run_gligen
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-meta-component-device"
CPU = "cpu"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_gligen_encodes_an_image_with_an_offloaded_vae():
    """It sends the image to ``self.vae.device``. The text encoder is not needed for the defect, so it stays."""
    import torch

    reference = run_gligen(gligen())
    pipe = gligen()
    offload(pipe.vae, pipe.unet)
    assert torch.equal(run_gligen(pipe), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("name", ["unet", "vae", "flux_transformer"])
def test_inputs_can_be_sent_to_the_device_of_a_model(name):
    import torch

    reference = outputs(getattr(models, name)())
    model = getattr(models, name)()
    offload(model)
    assert torch.equal(outputs(model), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_device_is_the_one_given_to_enable_sequential_cpu_offload(gpu):
    import torch

    reference = models.call_flux(models.flux_pipeline(), dtype=torch.float32)
    pipe = models.flux_pipeline()
    for device in (gpu.devices[0], gpu.devices[-1]):
        pipe.enable_sequential_cpu_offload(device=device)
        out = models.call_flux(pipe, dtype=torch.float32)  # sends the embeddings to pipe.transformer.device
        assert pipe.transformer.device == device == out.device
        torch.testing.assert_close(out.cpu(), reference)


# ---------------------------------------------------------------------- what must stay as it was


def test_a_model_that_nothing_holds_keeps_its_answer():
    import torch
    from accelerate import init_empty_weights
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_execution_device_hook

    with torch.device("meta"):
        unloaded = models.vae()
    assert unloaded.device.type == "meta"
    add_hook_to_module(unloaded, AlignDevicesHook(io_same_device=True))
    assert unloaded.device.type == "meta"
    with init_empty_weights():
        empty = models.vae()
    assert empty.device.type == "meta"
    attach_execution_device_hook(empty, "meta")
    assert empty.device.type == "meta"
    assert models.vae().device.type == CPU


def test_a_model_that_is_spread_but_not_offloaded_keeps_its_answer(gpu):
    from accelerate import dispatch_model

    first, second = gpu.pair
    model = dispatch_model(models.vae(), {"encoder": first, "decoder": second}, force_hooks=True)
    assert model.device == first


def test_a_model_that_is_offloaded_in_part_answers_for_its_first_weight(gpu):
    from accelerate import dispatch_model

    device = gpu.devices[-1].index
    resident_first = dispatch_model(models.vae(), {"encoder": device, "decoder": CPU}, main_device=device)
    offloaded_first = dispatch_model(models.vae(), {"encoder": CPU, "decoder": device}, main_device=device)
    assert resident_first.device == offloaded_first.device == gpu.devices[-1]


def test_model_offload_and_removed_hooks(gpu):
    from accelerate.hooks import remove_hook_from_module

    pipe = models.flux_pipeline()
    pipe.enable_sequential_cpu_offload(device=gpu.devices[0])
    pipe.enable_model_cpu_offload(device=gpu.devices[0])
    assert pipe.transformer.device.type == CPU
    vae = models.vae()
    offload(vae, device=gpu.devices[0])
    assert vae.device == gpu.devices[0]
    remove_hook_from_module(vae, recurse=True)
    assert vae.device.type == CPU


@pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="there was no group offloading before")
def test_group_offloading_keeps_its_own_answer(gpu):
    model = models.flux_transformer()
    model.enable_group_offload(onload_device=gpu.devices[0], offload_type="leaf_level")
    assert model.device == gpu.devices[0]


@pytest.mark.usefixtures("without_index")
def test_sequential_offload_without_an_index(gpu):
    """diffusers takes the first device then, whichever is the current one."""
    import torch

    pipe = models.flux_pipeline()
    pipe.enable_sequential_cpu_offload(device=spelled(gpu.devices[-1]))
    for _ in range(2):
        assert models.call_flux(pipe, dtype=torch.float32).device == gpu.devices[0]
        assert pipe.transformer.device == gpu.devices[0]


def test_weights_of_the_root_and_nested_hooks():
    """accelerate chains the hooks of a root that has weights of its own into a SequentialHook."""
    import torch
    from accelerate.hooks import SequentialHook
    from diffusers import ModelMixin

    class Scaled(ModelMixin):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([3.0]))
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x):
            return self.layer(x) * self.scale

    model = Scaled()
    with torch.no_grad():
        reference = model(torch.ones(1, 1))
        offload(model)
        assert isinstance(model._hf_hook, SequentialHook)
        assert torch.equal(model(torch.ones(1, 1).to(model.device)), reference)


def test_the_device_of_a_4bit_model(gpu, tmp_path):
    from diffusers import FluxTransformer2DModel

    folder = models.saved(models.flux_transformer(), tmp_path)
    model = models.load_quantized(FluxTransformer2DModel, folder)
    offload(model, device=gpu.devices[-1])
    assert model.device == gpu.devices[-1]


def test_without_accelerate_nothing_is_offloaded(monkeypatch):
    """No hook can exist, the probe finds nothing to patch, and the property answers as upstream's does."""
    import torch
    from diffusers.models import modeling_utils

    from diffusers_quantfix.fixes.diffusers.meta_component_device import broken

    monkeypatch.delitem(sys.modules, "accelerate.hooks")
    with torch.device("meta"):
        assert models.vae().device.type == "meta"
    assert models.vae().device.type == CPU
    assert not broken(modeling_utils)


def test_moving_an_offloaded_model_to_its_device_fails_at_once():
    """Upstream moves what was added since to meta, and the weights of an IP-Adapter are lost."""
    import torch

    model = models.unet()
    offload(model)
    model.added = torch.nn.Linear(1, 1)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model.to(model.device)
    assert model.added.weight.device.type == CPU


def test_the_property_is_a_plain_one():
    assert_plain_property(models.vae(), FIX_ID)


def outputs(model):
    """One forward pass with inputs that are sent to ``model.device``."""
    import torch

    if type(model).__name__ == "FluxTransformer2DModel":
        return models.call_flux(models.flux_pipeline(model), dtype=torch.float32)
    inputs = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if type(model).__name__ == "AutoencoderKL":
            return model.encode(inputs.to(model.device)).latent_dist.mode()
        latents, text = (
            inputs[:, :, :4, :16].reshape(1, 4, 4, 12)[..., :8, :8],
            inputs[:, 0, :2].reshape(1, 1, 64),
        )
        return model(latents.to(model.device), 1, text.to(model.device)).sample
