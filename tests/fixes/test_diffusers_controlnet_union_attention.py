"""diffusers-controlnet-union-attention: the attention of ControlNetUnion with quantized layers."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import each_spelling as each_spelling
from tests.fixes.group_offloaded import assert_works, modes
from tests.fixes.packed_layers import (
    KINDS,
    assert_computes_alike,
    assert_exact_under_sequential_offload,
    assert_near,
    compute_alike,
    torchao_linear,
)
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-controlnet-union-attention"
SHOWS = r"RuntimeError: .*(mat2|dtype|shape|m1 and m2)|AssertionError"

torch = pytest.importorskip("torch")
pytest.importorskip(
    "diffusers.models.controlnets.controlnet_union", reason="ControlNetUnion came with diffusers 0.32"
)
FEATURES = four_bit.FEATURES


def block(device, mask=None):
    from diffusers.models.controlnets.controlnet_union import ResidualAttentionBlock

    torch.manual_seed(0)
    return ResidualAttentionBlock(FEATURES, 4, mask).to(device).eval()


def tokens(device):
    return torch.randn(5, 2, FEATURES, generator=torch.Generator().manual_seed(11)).to(device)


def quantized_and_plain(linear, device, mask=None):
    """The same weights: in a quantized output layer, and as that computes with them."""
    quantized, plain = block(device, mask), block(device, mask)
    layer = quantized.attn.out_proj = linear(device, seed=3)
    compute_alike(plain.attn.out_proj, layer)
    return quantized, plain


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@KINDS
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_attention(gpu, linear, masked):
    device = gpu.devices[0]
    mask = torch.full((5, 5), float("-inf")).triu(1) if masked else None
    quantized, plain = quantized_and_plain(linear, device, mask)
    assert_computes_alike(linear, quantized, plain, [tokens(device)])


@pytest.mark.defect(FIX_ID, shows="attempting to run unimplemented operator")
def test_the_attention_with_torchao(gpu):
    device = gpu.devices[0]
    quantized, plain = quantized_and_plain(torchao_linear, device)
    with torch.no_grad():
        torch.testing.assert_close(quantized(tokens(device)), plain(tokens(device)))


@pytest.mark.defect(FIX_ID, shows=r"meta|RuntimeError|AssertionError")
def test_under_sequential_offload(gpu, each_spelling):
    """The attention's own weights, which are not those of its layer, are onloaded too."""
    given = tokens(gpu.devices[0])

    def run(model):
        with torch.no_grad():
            return model(given).cpu()

    assert_exact_under_sequential_offload(
        gpu, lambda device: quantized_and_plain(four_bit.linear, device)[0], run
    )


@pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="group offloading came with 0.33")
@pytest.mark.defect(FIX_ID, shows=r"meta|RuntimeError|AssertionError")
@modes("leaf", "leaf-stream", "leaf-low", "block")
def test_under_group_offload(gpu, mode):
    device = gpu.devices[0]

    def build():
        return torch.nn.Sequential(quantized_and_plain(four_bit.linear, device)[0].cpu())

    def call(model):
        if not any(hasattr(module, "_diffusers_hook") for module in model.modules()):
            model.to(device)
        return model(tokens(device)).cpu()

    assert_works(gpu, device, build, call, mode)


def union():
    from diffusers import ControlNetUnionModel

    torch.manual_seed(0)
    return ControlNetUnionModel(
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=64,
        attention_head_dim=8,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 64,
        conditioning_embedding_out_channels=(16, 32),
        num_control_type=6,
        num_trans_channel=32,
        num_trans_head=2,
        num_proj_channel=32,
    ).eval()


def run(model, device):
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    with torch.no_grad():
        down, middle = model(
            noise(2, 4, 8, 8),
            3,
            encoder_hidden_states=noise(2, 4, 64),
            controlnet_cond=[noise(2, 3, 16, 16)],
            control_type=torch.tensor([[1.0, 0, 0, 0, 0, 0]] * 2, device=device),
            control_type_idx=[0],
            added_cond_kwargs={"text_embeds": noise(2, 64), "time_ids": torch.ones(2, 6, device=device)},
            return_dict=False,
        )
    return torch.cat([one.flatten() for one in (*down, middle)]).cpu()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_from_a_checkpoint(gpu, tmp_path, bits):
    """Its last layers are zero until they are trained, so they are given values."""
    plain, device = union(), gpu.devices[0]
    with torch.no_grad():
        for parameter in plain.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    model = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits, dtype=torch.float32)
    if bits == 4:
        model.to(device)
    expected, out = run(plain, "cpu"), run(model, device)
    assert_near(out, expected, bits)


def test_a_plain_layer_takes_upstreams_way(gpu):
    device = gpu.devices[0]
    plain, calls = block(device), []
    plain.attn.out_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        plain(tokens(device))
    assert not calls
