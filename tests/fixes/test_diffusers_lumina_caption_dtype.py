"""diffusers-lumina-caption-dtype: Lumina-Next runs with a quantized transformer."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.packed_layers import (
    KINDS,
    assert_computes_alike,
    assert_exact_under_sequential_offload,
    assert_near,
    compute_alike,
)
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("bitsandbytes")

FIX_ID = "diffusers-lumina-caption-dtype"
SHOWS = (
    r"silu_(cpu|cuda)\W? not implemented for '(Byte|Char)'|expected scalar type|must be floating|same dtype"
    r"|AssertionError|only supports floating"
)
FEATURES = four_bit.FEATURES


def embedding(device):
    from diffusers.models.embeddings import LuminaCombinedTimestepCaptionEmbedding

    torch.manual_seed(0)
    return LuminaCombinedTimestepCaptionEmbedding(FEATURES, FEATURES, FEATURES).to(device).eval()


def quantized_embedding(device, linear=four_bit.linear):
    module = embedding(device)
    module.timestep_embedder.linear_1 = linear(device)
    return module


def inputs(device, timestep: int = 3):
    generator = torch.Generator().manual_seed(1)
    caption = torch.randn(2, 5, FEATURES, generator=generator)
    mask = torch.ones(2, 5, dtype=torch.long)
    return [one.to(device) for one in (torch.full((2,), timestep), caption, mask)]


@KINDS
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_embedding(gpu, linear):
    device = gpu.devices[0]
    quantized, plain = quantized_embedding(device, linear), embedding(device)
    compute_alike(plain.timestep_embedder.linear_1, quantized.timestep_embedder.linear_1)
    assert_computes_alike(linear, quantized, plain, inputs(device))


def test_under_sequential_offload(gpu):
    def run(module):
        with torch.no_grad():
            return module(*inputs(gpu.devices[0])).cpu()

    assert_exact_under_sequential_offload(gpu, quantized_embedding, run)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_hooks_of_the_embedder_run(gpu):
    device = gpu.devices[0]
    module, seen = quantized_embedding(device).bfloat16(), []
    module.timestep_embedder.register_forward_pre_hook(
        lambda embedder, args: seen.append((embedder, args[0].dtype))
    )
    timestep, caption, mask = inputs(device)
    with torch.no_grad():  # in the spelling of keyword arguments
        assert module(timestep, caption_feat=caption.bfloat16(), caption_mask=mask).dtype == torch.bfloat16
    assert seen == [(module.timestep_embedder, torch.bfloat16)]


def transformer():
    from diffusers import LuminaNextDiT2DModel

    torch.manual_seed(0)
    model = LuminaNextDiT2DModel(
        sample_size=4, patch_size=2, in_channels=4, hidden_size=64, num_layers=2, num_attention_heads=4,
        num_kv_heads=2, multiple_of=16, cross_attention_dim=64, scaling_factor=1.0,
    ).eval()  # fmt: skip
    with torch.no_grad():
        model.pad_token.normal_()  # upstream leaves it as the memory was
    return model


def run_transformer(model, device, timestep: float = 0.5):
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    generator = torch.Generator().manual_seed(1)
    latents, caption = (
        torch.randn(shape, generator=generator).to(device) for shape in ((1, 4, 8, 8), (1, 5, 64))
    )
    with torch.no_grad():
        return model(
            hidden_states=latents,
            timestep=torch.tensor([timestep], device=device),
            encoder_hidden_states=caption,
            encoder_mask=torch.ones(1, 5, dtype=torch.long, device=device),
            image_rotary_emb=get_2d_rotary_pos_embed_lumina(16, 384, 384).to(device),
            cross_attention_kwargs={},
        ).sample.cpu()


@pytest.mark.parametrize("bits", [pytest.param(4, marks=pytest.mark.defect(FIX_ID, shows=SHOWS)), 8])
def test_a_transformer_from_a_checkpoint(gpu, tmp_path, bits):
    plain, device = transformer(), gpu.devices[0]
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits, dtype=torch.float32)
    if bits == 4:
        model.to(device)
    expected, out = run_transformer(plain, "cpu"), run_transformer(model, device)
    assert_near(out, expected, bits)
    assert not torch.equal(run_transformer(model, device, timestep=0.1), out), (
        "the output does not depend on the time"
    )


def test_a_plain_embedding_runs_as_ever(gpu):
    device = gpu.devices[0]
    with torch.no_grad():
        assert embedding(device)(*inputs(device)).dtype == torch.float32
