"""diffusers-control-lora-reset: a layer that a Control LoRA had widened comes back on another device."""

from __future__ import annotations

import pytest

from tests.fixes import flux_loras, four_bit, lora_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import each_spelling as each_spelling
from tests.gate import unmet
from tests.rig import models

pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-control-lora-reset"
pytestmark = pytest.mark.skipif(
    bool(unmet("diffusers>=0.32.2")), reason="no reset of Control LoRAs before 0.32.2"
)
SHOWS = r"same device|is on |no hook"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_pipeline_moved_since_the_lora_came(gpu):
    here = gpu.devices[0]
    pipe = with_control()
    pipe.to(here)
    reset(pipe, here)


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_model_offload_while_the_model_is_on_the_device(gpu):
    """As after a run that was interrupted: accelerate takes such a model for complete."""
    here = gpu.devices[0]
    pipe = with_control()
    pipe.enable_model_cpu_offload(device=spelled(here))
    pipe.transformer.to(here)
    reset(pipe, here)


@pytest.mark.usefixtures("each_spelling")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_sequential_offload(gpu):
    here = gpu.devices[0]
    pipe = with_control()
    pipe.enable_sequential_cpu_offload(device=spelled(here))
    reset(pipe, here)
    assert all(parameter.is_meta for parameter in pipe.transformer.parameters())


@pytest.mark.usefixtures("each_spelling")
def test_control_lora_that_comes_under_offload(gpu):
    here = gpu.devices[0]
    for offload in ("enable_sequential_cpu_offload", "enable_model_cpu_offload"):
        pipe = pipeline()
        getattr(pipe, offload)(device=spelled(here))
        control(pipe)
        assert pipe.transformer.x_embedder.in_features == 128
        reset(pipe, here)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=r"it is a Linear|same device")
def test_a_quantized_layer_is_quantized_again(gpu, tmp_path, bits):
    """And the checkpoint that is saved then is whole."""
    import torch
    from diffusers import FluxTransformer2DModel

    here = gpu.devices[0]
    lora_models.skip_where_flux_takes_no_lora(bits)
    models.saved(models.flux_transformer(), tmp_path / "whole")
    model = four_bit.load(FluxTransformer2DModel, tmp_path / "whole", bits=bits)
    pipe = models.flux_pipeline(model)
    reference = lora_models.run(pipe, here, torch.float16)
    for _ in range(2):
        control(pipe)
        assert model.x_embedder.in_features == 128
        pipe.unload_lora_weights(reset_to_overwritten_params=True)
        kind = type(model.x_embedder).__name__
        assert kind in ("Linear4bit", "Linear8bitLt"), f"it is a {kind}"
        assert torch.equal(lora_models.run(pipe, here, torch.float16), reference)
    pipe.unload_lora_weights(reset_to_overwritten_params=True)
    model.save_pretrained(tmp_path / "saved")
    again = FluxTransformer2DModel.from_pretrained(tmp_path / "saved", torch_dtype=torch.float16)
    assert torch.equal(lora_models.run(models.flux_pipeline(again), here, torch.float16), reference)


@pytest.mark.parametrize("offload", ["enable_sequential_cpu_offload", "enable_model_cpu_offload"])
def test_a_quantized_layer_under_offload(gpu, tmp_path, offload):
    import torch
    from diffusers import FluxTransformer2DModel

    here = gpu.devices[0]
    lora_models.skip_where_flux_takes_no_lora(4)
    models.saved(models.flux_transformer(), tmp_path)
    pipe = models.flux_pipeline(four_bit.load(FluxTransformer2DModel, tmp_path, bits=4))
    reference = lora_models.run(pipe, here, torch.float16)
    getattr(pipe, offload)(device=here)
    control(pipe)
    pipe.unload_lora_weights(reset_to_overwritten_params=True)
    assert type(pipe.transformer.x_embedder).__name__ == "Linear4bit"
    assert torch.equal(lora_models.run(pipe, here, torch.float16), reference)
    assert torch.equal(lora_models.run(pipe, here, torch.float16), reference)


def reset(pipe, here):
    """Without the LoRA the pipeline is what it was before."""
    pipe.unload_lora_weights(reset_to_overwritten_params=True)
    assert pipe.transformer.x_embedder.in_features == 64
    places = {str(parameter.device) for parameter in pipe.transformer.parameters()}
    assert len(places) == 1, f"the model is on {' and '.join(sorted(places))}"
    reference = lora_models.run(pipeline())

    def check(latents):
        assert lora_models.distance(latents, reference) < 1e-5

    check(lora_models.run(pipe, here))
    # Early: at its end model offload moves all back with the hooks off.
    assert_goes_on(lambda: lora_models.run(pipe, here), check, (0.3, 0.5))


def with_control():
    return control(pipeline())


def pipeline():
    return models.flux_pipeline()


def control(pipe):
    """Load a LoRA that widens ``x_embedder`` from 64 to 128 features."""
    import torch

    generator = torch.Generator().manual_seed(5)
    lora = lora_models.weights()
    lora["transformer.x_embedder.lora_A.weight"] = torch.randn(4, 128, generator=generator)
    lora["transformer.x_embedder.lora_B.weight"] = torch.randn(64, 4, generator=generator)
    try:
        pipe.load_lora_weights(lora, adapter_name="control")
    except RuntimeError as error:
        if "Only Tensors of floating point" in str(error) and flux_loras.bare():
            pytest.skip("a quantized layer is not dequantized here (diffusers-control-lora-quantized)")
        raise
    return pipe
