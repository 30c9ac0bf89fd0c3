"""diffusers-flux-lora-packed: ordinary LoRAs for a Flux whose weights are packed."""

from __future__ import annotations

import pytest

from tests.fixes import flux_loras
from tests.fixes.flux_loras import X_EMBEDDER, lora, predicted, transformer, with_peft
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("peft", reason="peft is not installed")

FIX_ID = "diffusers-flux-lora-packed"
SHOWS = (
    "Only Tensors of floating point|size mismatch for|doesn't match the broadcast shape"
    "|Attempting to broadcast a dimension"
)
pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.32")), reason="no comparison of shapes before 0.32")
FIRST = {"nf4": "0.32.2", "fp4": "0.32.2", "gguf": "0.33"}  # the first releases that load ordinary LoRAs
packed = pytest.mark.parametrize("backend", FIRST)


def padded(weights: dict, channels: int) -> dict:
    key = f"{X_EMBEDDER}.lora_A.weight"
    wide = torch.zeros(4, channels)
    wide[:, : weights[key].shape[1]] = weights[key]
    return {**weights, key: wide}


@packed
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_ordinary_lora(gpu, tmp_path, backend):
    if flux_loras.bare() and not unmet(f"diffusers>={FIRST[backend]}"):
        pytest.skip("healthy: only the padding is wrong since then")
    device = gpu.devices[0]
    model = transformer(backend, tmp_path)
    pipe = models.flux_pipeline(model)
    without = predicted(model.to(device), device)
    pipe.load_lora_weights(lora(64), adapter_name="one")
    with_it = predicted(model, device)
    assert not torch.equal(with_it, without)
    wanted = predicted(with_peft(transformer(backend, tmp_path), lora(64)).to(device), device)
    assert torch.equal(with_it, wanted)


@packed
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_lora_with_fewer_input_channels(gpu, tmp_path, backend):
    """One for Flux.1-dev, loaded into Fill, Depth or Canny."""
    device = gpu.devices[0]
    model = transformer(backend, tmp_path, 128)
    weights = lora(64)
    given = {name: tensor.clone() for name, tensor in weights.items()}
    models.flux_pipeline(model).load_lora_weights(weights, adapter_name="one")
    assert weights.keys() == given.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in given.items())
    reference = with_peft(transformer(backend, tmp_path, 128), padded(lora(64), 128)).to(device)
    assert torch.equal(predicted(model.to(device), device, 128), predicted(reference, device, 128))


def alphas(weights: dict) -> dict:
    return {key.replace("lora_A.weight", "alpha"): torch.tensor(2.0) for key in weights if "lora_A" in key}


def magnitudes(weights: dict) -> dict:
    """Of a DoRA."""
    generator = torch.Generator().manual_seed(5)
    return {
        key.replace("lora_B.weight", "lora_magnitude_vector"): 0.5
        + torch.rand(up.shape[0], generator=generator)
        for key, up in weights.items()
        if "lora_B" in key
    }


def biases(weights: dict) -> dict:
    return {
        key.replace("lora_B.weight", "lora_B.bias"): torch.full(up.shape[:1], 0.1)
        for key, up in weights.items()
        if "lora_B" in key
    }


@packed
@pytest.mark.parametrize("more", [alphas, magnitudes, biases])
@pytest.mark.skipif(bool(unmet("diffusers>=0.35")), reason="not all kinds of LoRAs before")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_what_else_a_lora_may_hold(gpu, tmp_path, backend, more):
    device = gpu.devices[0]
    found = []
    for weights in (lora(64), padded(lora(64), 128)):
        model = transformer(backend, tmp_path, 128).to(device)
        without = predicted(model, device, 128)
        models.flux_pipeline(model).load_lora_weights({**weights, **more(weights)}, adapter_name="one")
        found.append(predicted(model, device, 128))
        assert not torch.equal(found[-1], without)
    assert torch.equal(*found)


@packed
@pytest.mark.parametrize("name", ["FluxFillPipeline", "FluxControlPipeline"])
def test_two_loras_and_none_again(gpu, tmp_path, backend, name):
    import diffusers

    device = gpu.devices[0]
    model = transformer(backend, tmp_path, 128).to(device)
    parts = {**models.flux_pipeline(model).components, "vae": models.vae()}
    pipe = getattr(diffusers, name)(
        **{part: parts[part] for part in parts if part not in ("image_encoder", "feature_extractor")}
    )
    without = predicted(model, device, 128)
    pipe.load_lora_weights(lora(64), adapter_name="one")
    one = predicted(model, device, 128)
    pipe.load_lora_weights(lora(128, seed=2), adapter_name="two")
    pipe.set_adapters("two")
    two = predicted(model, device, 128)
    reference = with_peft(transformer(backend, tmp_path, 128), lora(128, seed=2)).to(device)
    assert torch.equal(two, predicted(reference, device, 128))
    pipe.set_adapters("one")
    assert torch.equal(predicted(model, device, 128), one)
    if backend != "gguf":  # diffusers-fuse-lora-gguf refuses
        pipe.fuse_lora(components=["transformer"])
        assert not torch.equal(predicted(model, device, 128), without)
        pipe.unfuse_lora(components=["transformer"])
        assert torch.equal(predicted(model, device, 128), one)
    pipe.unload_lora_weights()
    assert torch.equal(predicted(model, device, 128), without)


@packed
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_a_lora_that_comes_under_offload(gpu, tmp_path, backend, offload):
    device = gpu.devices[0]
    model = transformer(backend, tmp_path, 128)
    pipe = models.flux_pipeline(model)
    getattr(pipe, offload)(device=device)
    pipe.load_lora_weights(lora(64), adapter_name="one")
    reference = with_peft(transformer(backend, tmp_path, 128), padded(lora(64), 128)).to(device)
    assert torch.equal(predicted(model, device, 128), predicted(reference, device, 128))


@packed
def test_layers_of_norms_in_the_lora(gpu, tmp_path, backend):
    """As in the LoRAs that Flux.1-Depth and Canny came as."""
    device = gpu.devices[0]
    model = transformer(backend, tmp_path).to(device)
    pipe = models.flux_pipeline(model)
    without = predicted(model, device)
    name = "transformer_blocks.0.attn.norm_q.weight"
    norm = torch.full_like(model.get_parameter(name), 2.0).cpu()
    pipe.load_lora_weights({**lora(64), f"transformer.{name}": norm}, adapter_name="one")
    assert torch.equal(model.get_parameter(name).cpu(), norm)
    reference = with_peft(transformer(backend, tmp_path), lora(64)).to(device)
    with torch.no_grad():
        reference.get_parameter(name).fill_(2)
    assert torch.equal(predicted(model, device), predicted(reference, device))
    pipe.unload_lora_weights()
    assert torch.equal(predicted(model, device), without)
