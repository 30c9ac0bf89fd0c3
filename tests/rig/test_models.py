"""The tiny models work on the rig: whole, and quantized through the libraries' own loading paths."""

from __future__ import annotations

import copy

import pytest

from tests.rig import models

torch = pytest.importorskip("torch")


def _devices_of(model) -> set:
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def test_a_pipeline_with_text_encoders_runs_the_same_on_any_device(gpu):
    pipeline = models.flux_pipeline(text=True)
    reference = models.prompt_flux(pipeline)
    assert reference.isfinite().all()
    assert reference.std() > 0
    for device in gpu.devices:
        latents = models.prompt_flux(pipeline.to(device))
        assert latents.device == device
        torch.testing.assert_close(latents.cpu(), reference, rtol=1e-4, atol=1e-4)
    del pipeline, latents
    assert [gpu.allocated(device) for device in gpu.devices] == [0] * len(gpu.devices)


def test_deep_copies_of_text_encoders_stay_on_their_device(gpu):
    for build in (models.clip_text, models.t5_encoder, models.vae, models.unet):
        model = build().to(gpu.devices[-1])
        twin = copy.deepcopy(model)
        assert _devices_of(twin) == {gpu.devices[-1]}
        before = gpu.allocated(gpu.devices[-1])
        del model
        assert gpu.allocated(gpu.devices[-1]) < before


@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading_uses_the_device_and_leaves_it_empty(gpu, offload):
    transformer = models.flux_transformer()
    size = sum(parameter.nbytes for parameter in transformer.parameters())
    reference = models.call_flux(models.flux_pipeline(transformer), "cpu", dtype=transformer.dtype)
    pipeline = models.flux_pipeline(transformer)
    getattr(pipeline, offload)()
    gpu.reset()
    latents = models.call_flux(pipeline, gpu.devices[0], dtype=reference.dtype)
    assert latents.device == gpu.devices[0]
    torch.testing.assert_close(latents.cpu(), reference, rtol=1e-4, atol=1e-4)
    pipeline.maybe_free_model_hooks()
    assert gpu.peak(gpu.devices[0]) > 1000
    assert gpu.allocated(gpu.devices[0]) < latents.nbytes + 1000  # the scheduler's time steps
    if gpu.kind == "rig":
        assert size <= gpu.traffic().h2d < size * 1.05


@pytest.mark.parametrize("double_quant", [False, True], ids=["", "double"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_4bit_transformer_loads_and_runs(gpu, tmp_path, quant_type, double_quant):
    from diffusers import FluxTransformer2DModel

    model = models.load_quantized(
        FluxTransformer2DModel,
        models.saved(models.flux_transformer(), tmp_path),
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
    )
    assert _devices_of(model) == {gpu.devices[0]}
    state = model.transformer_blocks[0].attn.to_q.weight.quant_state
    assert (state.quant_type, state.nested) == (quant_type, double_quant)
    latents = models.call_flux(models.flux_pipeline(model))
    whole = models.call_flux(
        models.flux_pipeline(models.flux_transformer().to(gpu.devices[0], torch.float16))
    )
    assert torch.nn.functional.cosine_similarity(latents.flatten(), whole.flatten(), dim=0) > 0.95


def test_an_8bit_transformer_loads_and_runs(gpu, tmp_path):
    from diffusers import FluxTransformer2DModel

    model = _load(FluxTransformer2DModel, models.saved(models.flux_transformer(), tmp_path), bits=8)
    assert model.transformer_blocks[0].attn.to_q.weight.dtype == torch.int8
    latents = models.call_flux(models.flux_pipeline(model))
    whole = models.call_flux(
        models.flux_pipeline(models.flux_transformer().to(gpu.devices[0], torch.float16))
    )
    assert torch.nn.functional.cosine_similarity(latents.flatten(), whole.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["t5_encoder", "clip_text"])
def test_a_quantized_text_encoder_loads_and_runs(gpu, tmp_path, name, bits):
    whole = getattr(models, name)()
    folder = models.saved(whole, tmp_path)
    model = _load(type(whole), folder, bits)
    tokens = torch.tensor([[2, 5, 6, 3]], device=gpu.devices[0])
    expected = whole.to(gpu.devices[0])(tokens).last_hidden_state
    result = model(tokens).last_hidden_state.float()
    assert torch.nn.functional.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.95


_REFUSALS = {
    "`.to` is not supported for `8-bit`": "8-bit models do not load (diffusers-8bit-model-gate)",
    "requires bitsandbytes: `pip install": "this transformers wants a newer bitsandbytes",
}


def _load(model_class, folder, bits):
    """Load quantized, or skip where these releases are known not to."""
    try:
        return models.load_quantized(model_class, folder, bits=bits)
    except (ImportError, ValueError) as error:
        for text, reason in _REFUSALS.items():
            if text in str(error):
                pytest.skip(f"with these releases {reason}")
        raise
