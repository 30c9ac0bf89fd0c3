"""diffusers-gguf-sequential: a rebuilt GGUF weight loses its quantization type."""

from __future__ import annotations

import copy

import pytest

from tests.fixes import gguf_models
from tests.fixes.callers import assert_goes_on
from tests.gate import ONE_GRAPH, unmet

FIX_ID = "diffusers-gguf-sequential"
SHOWS = r"KeyError: None"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_sequential_offload_is_exact(folder):
    import torch
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    model = gguf_models.transformer(folder)
    reference, count = gguf_models.run(model), len(gguf_models.weights_of(model))
    cpu_offload(model, torch.device("cpu"))

    def check(output):
        assert torch.equal(output, reference)
        assert all(parameter.is_meta for parameter in model.parameters())

    check(gguf_models.run(model))
    assert_goes_on(lambda: gguf_models.run(model), check)
    assert len(gguf_models.weights_of(model)) == count > 0
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(gguf_models.run(model), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_copy_is_another_model(folder):
    import torch

    model = gguf_models.transformer(folder)
    reference = gguf_models.run(model)
    other = copy.deepcopy(model)
    assert len(gguf_models.weights_of(other)) == len(gguf_models.weights_of(model)) > 0
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(gguf_models.run(other), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_pipeline_between_devices(gpu, folder):
    """Sequential offload as users switch it on: whole model on the CPU between two uses."""
    import torch

    from tests.rig import models

    device = gpu.devices[0]
    reference = gguf_models.run(gguf_models.transformer(folder).to(device), device)
    pipeline = models.flux_pipeline(gguf_models.transformer(folder))
    pipeline.enable_sequential_cpu_offload(gpu_id=device.index or 0)
    for _ in range(2):
        latents = models.call_flux(pipeline, device=device, dtype=torch.float32).cpu()
        torch.testing.assert_close(latents, reference, rtol=0, atol=0)
        del latents
    gpu.reset()
    models.call_flux(pipeline, device=device, dtype=torch.float32)
    assert gpu.traffic().d2h < 64 * 1024, "the weights travel to the device, not back"


def test_a_type_that_is_named_counts(folder):
    import torch

    weight = gguf_models.weights_of(gguf_models.transformer(folder))[0]
    other = next(
        kind for kind in type(weight.quant_type) if kind != weight.quant_type and kind.name == "Q8_0"
    )
    assert type(weight)(weight, quant_type=other).quant_type == other
    assert (
        type(weight)(torch.zeros(1, 18, dtype=torch.uint8), quant_type=weight.quant_type).dtype == torch.uint8
    )


@pytest.mark.thorough
def test_compiles_as_before(folder):
    """``__new__`` runs in the forward of every layer; whatever compiles upstream compiles with ours."""
    import torch

    if sentence := unmet(ONE_GRAPH["gguf"]):
        pytest.skip(f"GGUF layers compile in one graph from torch 2.8 on; {sentence}")
    model = gguf_models.transformer(folder)
    layer = next(module for module in model.modules() if type(module).__name__ == "GGUFLinear")
    x = torch.randn(2, layer.in_features)
    with torch.no_grad():
        compiled = torch.compile(layer.forward, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), layer(x))
