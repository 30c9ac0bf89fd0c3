"""diffusers-gguf-plain-parameter: weights of a GGUF model that are dequantized while they are loaded."""

from __future__ import annotations

import copy

import pytest

from tests.fixes import gguf_models
from tests.gate import unmet

FIX_ID = "diffusers-gguf-plain-parameter"
SHOWS = r"new\(\) received an invalid combination of arguments"
NEEDS = "diffusers>=0.39"  # older ones do not dequantize while they load
PLAIN = ["proj_out", "x_embedder"]

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=NEEDS)
def test_an_offloaded_layer(gpu, folder):
    """The layer alone: in the whole model diffusers-gguf-sequential shows before it."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    device = gpu.devices[0]
    model = gguf_models.transformer(folder, plain=PLAIN).to(device)
    reference = gguf_models.run(model, device)
    model.proj_out.to("cpu")
    cpu_offload(model.proj_out, device)
    assert torch.equal(gguf_models.run(model, device), reference)
    assert model.proj_out.weight.is_meta
    remove_hook_from_module(model.proj_out)
    model.to(device)
    assert torch.equal(gguf_models.run(model, device), reference)


@pytest.mark.defect(FIX_ID, shows="AssertionError", needs=NEEDS)
def test_every_weight_is_a_parameter(folder):
    model = gguf_models.transformer(folder, plain=PLAIN)
    for layer in (model.proj_out, copy.deepcopy(model.proj_out)):
        assert isinstance(layer._parameters["weight"], torch.nn.Parameter)
        assert not layer.weight.requires_grad


@pytest.mark.skipif(bool(unmet(NEEDS)), reason="older ones leave the packed bytes in plain layers")
def test_the_whole_model_under_sequential_offload(gpu, folder):
    from accelerate import cpu_offload

    device = gpu.devices[0]
    reference = gguf_models.run(gguf_models.transformer(folder, plain=PLAIN).to(device), device)
    model = gguf_models.transformer(folder, plain=PLAIN)
    cpu_offload(model, device)
    assert torch.equal(gguf_models.run(model, device), reference)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_without_plain_layers_nothing_changes(folder):
    model = gguf_models.transformer(folder)
    assert type(model.proj_out.weight).__name__ == "GGUFParameter"
    assert model.proj_out.weight.quant_type is not None
