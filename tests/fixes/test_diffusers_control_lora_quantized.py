"""diffusers-control-lora-quantized: a LoRA that widens a quantized layer of Flux."""

from __future__ import annotations

import pytest

from diffusers_quantfix.loading.device import accelerator_types
from tests.fixes import flux_loras
from tests.fixes.flux_loras import lora, predicted, transformer
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-control-lora-quantized"
SHOWS = (
    "Only Tensors of floating point|'NoneType' object has no attribute 'type'"
    "|Torch not compiled with CUDA enabled|Found no NVIDIA driver|Cannot initialize CUDA without ATen_cuda"
)
pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.32")), reason="no Control LoRAs before 0.32")
FIRST = {"nf4": "0.33", "fp4": "0.33", "int8": "0.34"}  # the first releases that dequantize the layer


def weight_of(layer):
    """The numbers of a quantized weight, in the layer's dtype, on the CPU."""
    weight = layer.weight
    if type(weight).__name__ == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        found = dequantize_4bit(weight.data, weight.quant_state)
    elif type(weight).__name__ == "Int8Params":
        found = weight.data.float() * weight.SCB.view(-1, 1) / 127
    else:
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        found = dequantize_gguf_tensor(weight)
    return found.to("cpu", layer.bias.dtype)


def assert_right(pipe, backend, folder, device):
    """It gives what a model gives whose first layer was plain when the LoRA came."""
    model = pipe.transformer
    assert model.x_embedder.in_features == model.config.in_channels == 128
    other = transformer(backend, folder)
    if device != "cpu":
        other.to(device)
    old = other.x_embedder
    other.x_embedder = torch.nn.Linear(64, 64, dtype=old.bias.dtype, device=device).requires_grad_(False)
    other.x_embedder.weight.copy_(weight_of(old))
    other.x_embedder.bias.copy_(old.bias)
    models.flux_pipeline(other).load_lora_weights(lora(128), adapter_name="control")
    off = (model.x_embedder.base_layer.weight.cpu() - other.x_embedder.base_layer.weight.cpu()).abs().max()
    assert off < 1e-3, f"the weights of the layer are off by {off}"
    got, wanted = predicted(model, device, 128), predicted(other, device, 128)
    assert torch.allclose(got.float(), wanted.float(), atol=0 if backend != "int8" else 0.02)


@pytest.mark.parametrize("backend", FIRST)
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_bitsandbytes(gpu, tmp_path, backend):
    if flux_loras.bare() and not unmet(f"diffusers>={FIRST[backend]}"):
        pytest.skip("healthy with an accelerator")
    device = gpu.devices[0]
    model = transformer(backend, tmp_path)
    pipe = models.flux_pipeline(model)
    if backend != "int8":
        model.to(device)
    pipe.load_lora_weights(lora(128), adapter_name="control")
    pipe.transformer.to(device)
    assert_right(pipe, backend, tmp_path, device)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_gguf_without_an_accelerator(tmp_path):
    if accelerator_types():
        pytest.skip("this machine has a GPU")
    pipe = models.flux_pipeline(transformer("gguf", tmp_path))
    pipe.load_lora_weights(lora(128), adapter_name="control")
    assert_right(pipe, "gguf", tmp_path, "cpu")


@pytest.mark.parametrize("backend", ["nf4", "int8"])
def test_bitsandbytes_on_the_cpu(tmp_path, backend):
    if unmet("bitsandbytes>=0.46"):
        pytest.skip("this bitsandbytes quantizes on a GPU only")
    pipe = models.flux_pipeline(transformer(backend, tmp_path))
    pipe.load_lora_weights(lora(128), adapter_name="control")
    weight = pipe.transformer.x_embedder.base_layer.weight
    wanted = weight_of(transformer(backend, tmp_path).x_embedder)
    assert weight.shape == (64, 128)
    assert (weight[:, :64] - wanted).abs().max() < 1e-3
    assert not weight[:, 64:].any()


def test_what_cannot_be_widened_stays(gpu, tmp_path):
    """The layers are the same if upstream raises after they were dequantized."""
    from unittest import mock

    model = transformer("nf4", tmp_path).to(gpu.devices[0])
    pipe = models.flux_pipeline(model)
    layer = model.x_embedder
    with mock.patch("torch.zeros_like", side_effect=MemoryError("no room")), pytest.raises(MemoryError):
        pipe.load_lora_weights(lora(128), adapter_name="control")
    assert model.x_embedder is layer
    assert model.config.in_channels == 64
    assert not getattr(model, "peft_config", None)
