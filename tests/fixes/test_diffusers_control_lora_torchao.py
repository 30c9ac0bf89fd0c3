"""diffusers-control-lora-torchao: a LoRA that widens a layer of torchao."""

from __future__ import annotations

import pytest

from tests.fixes import casts, lora_models
from tests.fixes.callers import assert_goes_on
from tests.fixes.test_diffusers_control_lora_reset import control
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-control-lora-torchao"
SHOWS = "'Tensor' object has no attribute 'tensor_data_names'|Not supported args for copy_ due to metadata mismatch"
pytestmark = [
    pytest.mark.skipif(
        bool(unmet("diffusers>=0.36")), reason="before 0.36 diffusers takes no config object of torchao"
    ),
    pytest.mark.defect(FIX_ID, shows=SHOWS),
]


def loaded(folder):
    """A Flux pipeline in bfloat16 with int8 weights of torchao, on the CPU."""
    import diffusers

    if not (folder / "config.json").exists():
        models.saved(models.flux_transformer(), folder)
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=casts.torchao_config(diffusers), torch_dtype=torch.bfloat16
    )
    return models.flux_pipeline(transformer)


def predicted(pipe, device):
    """What the widened transformer says, as FluxControlPipeline calls it: 64 features of the image are the control."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = {
        "hidden_states": (1, 4, 128),
        "encoder_hidden_states": (1, 8, 64),
        "pooled_projections": (1, 64),
    }
    inputs = {
        name: torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }
    ids = {name: torch.zeros(length, 3, device=device) for name, length in (("img_ids", 4), ("txt_ids", 8))}
    with torch.no_grad():
        timestep = torch.ones(1, device=device, dtype=torch.bfloat16)
        return pipe.transformer(**inputs, **ids, timestep=timestep, return_dict=False)[0].cpu()


def expected(folder, device):
    """(latents without the Control LoRA, prediction of the same model with it, whose first layer was plain)"""
    pipe = loaded(folder)
    pipe.to(device)
    without = lora_models.run(pipe, device, torch.bfloat16)
    layer = pipe.transformer.x_embedder
    layer.weight = torch.nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return without, predicted(control(pipe), device)


@pytest.mark.parametrize("place", ["to", "enable_model_cpu_offload", "enable_sequential_cpu_offload"])
@pytest.mark.parametrize("first", ["lora", "place"])
def test_a_control_lora(gpu, tmp_path, place, first):
    device = gpu.devices[0]
    without, wanted = expected(tmp_path, device)
    pipe = loaded(tmp_path)

    def equal(prediction):
        assert torch.equal(prediction, wanted), f"off by {lora_models.distance(prediction, wanted)}"

    if first == "lora":
        control(pipe)
    pipe.to(device) if place == "to" else getattr(pipe, place)(device=device)
    if first == "place":
        control(pipe)
    assert pipe.transformer.x_embedder.in_features == 128
    equal(predicted(pipe, device))
    # torchao cannot be offloaded in inference mode: test_torchao_limits.py
    assert_goes_on(lambda: predicted(pipe, device), equal, inference_mode=False)
    pipe.unload_lora_weights(reset_to_overwritten_params=True)
    assert torch.equal(lora_models.run(pipe, device, torch.bfloat16), without)
    assert type(pipe.transformer.x_embedder.weight).__name__ != "Parameter", "the layer stayed plain"


def test_it_is_saved_as_it_was(gpu, tmp_path):
    """After the Control LoRA the layer is quantized again, and so is the checkpoint."""
    pipe = loaded(tmp_path)
    without = lora_models.run(pipe, "cpu", torch.bfloat16)
    control(pipe).unload_lora_weights(reset_to_overwritten_params=True)
    kind = type(pipe.transformer.x_embedder.weight)
    assert kind is type(pipe.transformer.proj_out.weight)
    assert torch.equal(lora_models.run(pipe, "cpu", torch.bfloat16), without)
