"""diffusers-hunyuan-pooler-weights: the pooling of HunyuanDiT with quantized layers."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit, group_offloaded
from tests.fixes.packed_layers import (
    KINDS,
    assert_computes_alike,
    assert_near,
    compute_alike,
    torchao_linear,
)
from tests.gate import ONE_GRAPH, unmet
from tests.rig import models

FIX_ID = "diffusers-hunyuan-pooler-weights"
SHOWS = r"RuntimeError: .*(mat2|dtype|shape|m1 and m2)|AssertionError"

torch = pytest.importorskip("torch")
FEATURES = four_bit.FEATURES
LAYERS = ("q_proj", "k_proj", "v_proj", "c_proj")


def pool(device):
    from diffusers.models.embeddings import HunyuanDiTAttentionPool

    torch.manual_seed(0)
    return HunyuanDiTAttentionPool(5, FEATURES, 4).to(device).eval()


def tokens(device):
    return torch.randn(2, 5, FEATURES, generator=torch.Generator().manual_seed(11)).to(device)


def quantized_and_plain(linear, device):
    """The same weights: in quantized layers, and as those compute with them."""
    quantized, plain = pool(device), pool(device)
    layers = {name: linear(device, seed=i) for i, name in enumerate(LAYERS)}
    for name, layer in layers.items():
        setattr(quantized, name, layer)
        compute_alike(getattr(plain, name), layer)
    return quantized, plain


@KINDS
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_pool(gpu, linear):
    device = gpu.devices[0]
    quantized, plain = quantized_and_plain(linear, device)
    assert_computes_alike(linear, quantized, plain, [tokens(device)])


@pytest.mark.defect(FIX_ID, shows="attempting to run unimplemented operator")
def test_the_pool_with_torchao(gpu):
    device = gpu.devices[0]
    quantized, plain = quantized_and_plain(torchao_linear, device)
    with torch.no_grad():
        torch.testing.assert_close(quantized(tokens(device)), plain(tokens(device)))


@pytest.mark.defect(
    FIX_ID, shows="Expected all tensors to be on the same device|is not on the expected device"
)
@pytest.mark.parametrize("how", ["leaf", "leaf, stream", "sequential"])
def test_plain_layers_that_are_offloaded(gpu, how):
    """As where the pooler is kept from quantization: the hooks of its layers run when these are called."""
    device = gpu.devices[0]
    expected, model = pool(device)(tokens(device)), pool("cpu")
    if how == "sequential":
        from accelerate import cpu_offload

        cpu_offload(model, device)
    elif unmet("diffusers>=0.33"):
        pytest.skip("group offloading came with 0.33")
    else:
        mode = group_offloaded.LEAF | (group_offloaded.STREAM if "stream" in how else {})
        group_offloaded.offload(model, device, mode)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(tokens(device)), expected)
    assert {parameter.device.type for parameter in model.parameters()} <= {"cpu", "meta"}


def hunyuan():
    from diffusers import HunyuanDiT2DModel

    torch.manual_seed(0)
    return HunyuanDiT2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=32,
        num_attention_heads=2,
        in_channels=4,
        cross_attention_dim=64,
        cross_attention_dim_t5=64,
        pooled_projection_dim=64,
        hidden_size=64,
        text_len=4,
        text_len_t5=4,
    ).eval()


def run(model, device):
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    rope = get_2d_rotary_pos_embed(32, ((0, 0), (4, 4)), (4, 4), **numpy_or_torch())
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    with torch.no_grad():
        return model(
            noise(2, 4, 8, 8),
            torch.tensor([3.0, 3.0], device=device),
            encoder_hidden_states=noise(2, 4, 64),
            text_embedding_mask=torch.ones(2, 4, device=device),
            encoder_hidden_states_t5=noise(2, 4, 64),
            text_embedding_mask_t5=torch.ones(2, 4, device=device),
            image_meta_size=torch.ones(2, 6, device=device),
            style=torch.zeros(2, device=device, dtype=torch.long),
            image_rotary_emb=[table.to(device) for table in rope],
            return_dict=False,
        )[0].cpu()


def numpy_or_torch() -> dict:
    """Later releases want to be told; the earliest gives tensors of its own accord."""
    from inspect import signature

    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    return {"output_type": "pt"} if "output_type" in signature(get_2d_rotary_pos_embed).parameters else {}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_from_a_checkpoint(gpu, tmp_path, bits):
    plain, device = hunyuan(), gpu.devices[0]
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits, dtype=torch.float32)
    if bits == 4:
        model.to(device)
    expected, out = run(plain, "cpu"), run(model, device)
    assert_near(out, expected, bits)


def test_plain_layers_take_upstreams_way(gpu):
    """Also those of a quantized model that quantization left out: nothing is computed in another way."""
    device = gpu.devices[0]
    plain, calls = pool(device), []
    for name in LAYERS:
        getattr(plain, name).register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        plain(tokens(device))
    assert not calls


def test_in_one_graph():
    for requirement in (ONE_GRAPH["4-bit"], "bitsandbytes>=0.50"):
        if reason := unmet(requirement):
            pytest.skip(reason)
    quantized, _ = quantized_and_plain(four_bit.linear, "cpu")
    with torch.no_grad():
        expected = quantized(tokens("cpu"))
        compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(tokens("cpu")), expected)
