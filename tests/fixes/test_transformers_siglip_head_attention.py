"""transformers-siglip-head-attention, transformers-siglip2-head-attention: a head with a quantized output layer."""

from __future__ import annotations

import importlib

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import spelling as spelling
from tests.fixes.packed_layers import (
    KINDS,
    assert_computes_alike,
    assert_exact_under_sequential_offload,
    assert_near,
    compute_alike,
)
from tests.rig import models

SIGLIP, SIGLIP2 = "transformers-siglip-head-attention", "transformers-siglip2-head-attention"
SHOWS = r"RuntimeError: .*(mat2|dtype|shape|m1 and m2)|AssertionError"
# Newer ones leave the layer of torch's attention as it is.
QUANTIZED = "transformers<5.1"

torch = pytest.importorskip("torch")
FEATURES = four_bit.FEATURES


def modeling(name: str):
    return pytest.importorskip(
        f"transformers.models.{name}.modeling_{name}", reason="SigLIP 2 came with transformers 4.50"
    )


def head(name: str, device):
    module = modeling(name)
    prefix = name.capitalize()
    config = getattr(module, f"{prefix}VisionConfig")(
        hidden_size=FEATURES, intermediate_size=128, num_attention_heads=4
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    made = getattr(module, f"{prefix}MultiheadAttentionPoolingHead")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.1)
    return made.to(device).eval()


def given(name: str, device, dtype, masked: bool = False):
    tokens = torch.randn(2, 5, FEATURES, generator=torch.Generator().manual_seed(11)).to(device, dtype)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], device=device)
    return (tokens, mask) if masked else (tokens,)


def quantized_and_plain(name: str, linear, device):
    """The same weights: in a quantized output layer, and as that computes with them."""
    quantized, plain = head(name, device), head(name, device)
    layer = quantized.attention.out_proj = linear(device, seed=3)
    compute_alike(plain.attention.out_proj, layer)
    return quantized, plain


@KINDS
@pytest.mark.parametrize(
    ("name", "masked"),
    [
        pytest.param("siglip", False, marks=pytest.mark.defect(SIGLIP, shows=SHOWS)),
        pytest.param("siglip2", False, marks=pytest.mark.defect(SIGLIP2, shows=SHOWS)),
        pytest.param("siglip2", True, marks=pytest.mark.defect(SIGLIP2, shows=SHOWS)),
    ],
)
def test_the_head(gpu, linear, name, masked):
    device = gpu.devices[0]
    quantized, plain = quantized_and_plain(name, linear, device)
    assert_computes_alike(linear, quantized, plain, given(name, device, torch.float32, masked))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("siglip", marks=pytest.mark.defect(SIGLIP, shows=SHOWS)),
        pytest.param("siglip2", marks=pytest.mark.defect(SIGLIP2, shows=SHOWS)),
    ],
)
def test_under_sequential_offload(gpu, name):
    inputs = given(name, gpu.devices[0], torch.float32)

    def run(model):
        with torch.no_grad():
            return model(*inputs).cpu()

    assert_exact_under_sequential_offload(
        gpu, lambda device: quantized_and_plain(name, four_bit.linear, device)[0], run
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(SIGLIP, shows=SHOWS, needs=QUANTIZED)
def test_a_model_from_a_checkpoint(gpu, tmp_path, bits):
    module, device = modeling("siglip"), gpu.devices[0]
    torch.manual_seed(0)
    plain = module.SiglipVisionModel(
        importlib.import_module("transformers").SiglipVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        )
    ).eval()
    folder = models.saved(plain, tmp_path)
    model = four_bit.load(type(plain), folder, bits=bits, dtype=torch.float16, device_map={"": 0})

    def pooled(model, device, dtype):
        pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return model(pixels.to(device, dtype)).pooler_output.float().cpu()

    expected, out = pooled(plain, "cpu", torch.float32), pooled(model, device, torch.float16)
    assert_near(out, expected, bits)


@pytest.mark.parametrize("name", ["siglip", "siglip2"])
def test_a_plain_layer_takes_upstreams_way(gpu, name):
    device = gpu.devices[0]
    plain, calls = head(name, device), []
    plain.attention.out_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        plain(*given(name, device, torch.float32))
    assert not calls
