"""diffusers-device-map-hooks: a model that was loaded onto one GPU by a device_map cannot be moved."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.models.hooked import execution_devices
from tests.rig import models

FIX_ID = "diffusers-device-map-hooks"
DETECTION = "diffusers-8bit-offload-detection"  # its patch decides what counts as offloaded
GUARD = "activated sequential model offloading"
MAPS = [{"": 0}, "auto"]


def _load(plain, folder, device_map):
    return type(plain).from_pretrained(models.saved(plain, folder), device_map=device_map)


def _run(model, device):
    import torch

    from diffusers_quantfix.verify.models.flux import inputs

    with torch.no_grad():
        return model(**{name: value.to(device) for name, value in inputs().items()}).sample


@pytest.mark.defect(FIX_ID, shows="same device|same GPU")
@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_a_moved_model_runs_where_it_is(gpu, tmp_path, device_map):
    import torch

    plain = models.flux_transformer()
    model = _load(plain, tmp_path, device_map)
    here, there = gpu.devices[0], gpu.devices[-1]
    reference = _run(model, here).cpu()
    for device in (there, torch.device("cpu"), here, there):
        model.to(device)
        output = _run(model, device)
        assert output.device == device
        torch.testing.assert_close(output.cpu(), reference)


@pytest.mark.defect(DETECTION, shows=GUARD, needs="diffusers<0.33")
@pytest.mark.defect(FIX_ID, shows=GUARD)
@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_its_pipeline_goes_to_every_device(gpu, tmp_path, device_map):
    """There its inputs may be on the CPU, as they may be where it was loaded: programs for these releases do that."""
    import torch

    model = _load(models.flux_transformer(), tmp_path, device_map)
    inputs = ["cpu"] if hasattr(model, "_hf_hook") else []
    pipe = models.flux_pipeline(model)
    reference = _run(model, gpu.devices[0]).cpu()
    for device in (gpu.devices[-1], gpu.devices[0]):
        pipe.to(device)
        for place in (device, *inputs):
            torch.testing.assert_close(_run(model, place).cpu(), reference)


@pytest.mark.defect(FIX_ID, shows="execution device")
@pytest.mark.parametrize("move", ["to", "cuda"])
def test_every_hook_follows(gpu, tmp_path, move):
    model = _load(models.flux_transformer(), tmp_path, {"": 0})
    model.to("cpu")
    device = "cpu"
    if move == "cuda":
        model.cuda(gpu.devices[-1])
        device = str(gpu.devices[-1])
    found = set(execution_devices(model).values())
    assert found <= {device}, f"an execution device is left: {found}"


def test_what_was_loaded_is_returned_with_what_was_asked_for(gpu, tmp_path):
    plain = models.flux_transformer()
    folder = models.saved(plain, tmp_path)
    loaded = type(plain).from_pretrained(folder, device_map={"": 0}, output_loading_info=True)
    assert isinstance(loaded, tuple)
    assert not loaded[1]["missing_keys"]


def test_removed_hooks_leave_nothing(gpu, tmp_path):
    """accelerate takes back what ``dispatch_model`` put over the model's own methods."""
    from accelerate.hooks import remove_hook_from_module

    model = _load(models.flux_transformer(), tmp_path, {"": 0})
    remove_hook_from_module(model, recurse=True)
    assert not {"to", "cuda"} & vars(model).keys()


@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_an_offloaded_pipeline_is_refused_as_before(gpu, tmp_path, offload):
    """What really offloads takes the model's first hooks off."""
    import torch

    model = _load(models.flux_transformer(), tmp_path, {"": 0})
    pipe = models.flux_pipeline(model)
    getattr(pipe, offload)(device=gpu.devices[0])
    if offload == "enable_sequential_cpu_offload":
        with pytest.raises(ValueError, match=GUARD):
            pipe.to(gpu.devices[0])
    models.call_flux(pipe, gpu.devices[0], torch.float32)


def test_a_spread_model_keeps_its_hooks(gpu, tmp_path):
    """It cannot be moved as a whole."""
    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    plain = models.flux_transformer()
    spread = {name: int(name == "single_transformer_blocks") for name, _ in plain.named_children()}
    model = _load(plain, tmp_path, spread)
    before = execution_devices(model)
    with pytest.raises(ValueError, match=GUARD):
        models.flux_pipeline(model).to(gpu.devices[0])
    model.to(gpu.devices[0])
    assert execution_devices(model) == before
