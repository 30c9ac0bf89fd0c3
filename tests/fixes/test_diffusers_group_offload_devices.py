"""diffusers-group-offload-devices: what a pipeline computes beside its group-offloaded models."""

from __future__ import annotations

import pytest

from tests.fixes.callers import assert_goes_on
from tests.fixes.callers import spelling as spelling
from tests.fixes.group_offloaded import modes, offload, stop

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.hooks.group_offloading", reason="group offloading came with diffusers 0.33.0")
pytest.importorskip("transformers")

MODULAR = "diffusers>=0.35"


@pytest.mark.defect("diffusers-group-offload-pipeline-device", shows="should be the same|on the same device")
@modes("leaf", "block", "leaf-stream", "block-stream")
def test_ledits_encodes_an_image(gpu, mode):
    from diffusers_quantfix.verify.models import group_pipelines, ledits

    device = gpu.devices[0]
    expected = ledits.encoded(ledits.pipeline("LEditsPPPipelineStableDiffusion").to(device))
    pipe = group_pipelines.classic(device, lambda model, device: offload(model, device, mode))

    def run():
        return ledits.encoded(pipe)

    def same(output):
        assert output.device == device
        assert torch.equal(output, expected)

    for _ in range(2):
        same(run())
    assert_goes_on(run, same)
    assert pipe.device.type == device.type
    for model in (pipe.text_encoder, pipe.unet):
        stop(model)
        model.to("cpu")
    pipe.vae.to("cpu")
    assert pipe.device.type == "cpu"


@pytest.mark.defect("diffusers-group-offload-modular-device", shows="on the same device", needs=MODULAR)
@modes("leaf", "block", "leaf-stream", "block-stream")
def test_a_modular_pipeline_runs(gpu, mode):
    from diffusers_quantfix.verify.models import group_pipelines

    device = gpu.devices[0]
    pipe = group_pipelines.modular(device, lambda model, device: model.to(device))
    expected = group_pipelines.step(pipe)
    pipe = group_pipelines.modular(device, lambda model, device: offload(model, device, mode))

    def same(output):
        assert output.device == device
        assert torch.equal(output, expected)

    for _ in range(2):
        same(group_pipelines.step(pipe))
    assert_goes_on(lambda: group_pipelines.step(pipe), same)
    stop(pipe.text_encoder)
    assert pipe.text_encoder.to("cpu") is not None
    assert pipe._execution_device.type == "cpu"


def test_a_pipeline_without_group_offload_has_the_device_that_it_had(gpu):
    from diffusers_quantfix.verify.models import group_pipelines

    pipe = group_pipelines.classic(gpu.devices[1], lambda model, device: model.to(device))
    assert pipe.device == gpu.devices[1]
    assert pipe.to("cpu").device.type == "cpu"
    pipe.enable_sequential_cpu_offload(device=gpu.devices[1])
    assert pipe.device == gpu.devices[1]
