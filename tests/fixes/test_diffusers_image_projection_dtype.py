"""diffusers-image-projection-dtype: the image of Kandinsky 2.2 reaches a quantized UNet."""

from __future__ import annotations

import pytest

from tests.fixes import eight_bit, four_bit
from tests.fixes.packed_layers import compute_alike, gguf_linear
from tests.gate import ONE_GRAPH, unmet
from tests.rig import models

FIX_ID = "diffusers-image-projection-dtype"
SHOWS = (
    r"mixed dtype \(CPU\)|not implemented for '(Char|Byte)'|expected scalar type"
    r"|must be floating|the same dtype|AssertionError"
)

torch = pytest.importorskip("torch")
FEATURES = four_bit.FEATURES


def projection(layer, device):
    """An ``ImageProjection`` around ``layer``, and its twin with the weights that the layer computes with."""
    from diffusers.models.embeddings import ImageProjection

    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(ImageProjection(FEATURES, FEATURES // 2, 2).to(device).eval())
    made[0].image_embeds = layer
    compute_alike(made[1].image_embeds, layer)
    return made


def images(device, rows: int = 3):
    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(3)).to(device)


@pytest.mark.parametrize("linear", [four_bit.linear, gguf_linear], ids=["4-bit", "gguf"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_projection(gpu, linear):
    device = gpu.devices[0]
    quantized, plain = projection(linear(device), device)
    with torch.no_grad():
        out = quantized(images(device))
        torch.testing.assert_close(out, plain(images(device)), rtol=0.02, atol=0.02)
        assert torch.equal(quantized(images(device)), out)
        assert torch.equal(quantized(image_embeds=images(device)), out)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.45")
def test_in_8_bits(gpu):
    device = gpu.devices[0]
    quantized, plain = projection(eight_bit.linear(device, FEATURES), device)
    quantized, plain = quantized.half(), plain.half()
    with torch.no_grad():
        out, expected = (model(images(device).half()) for model in (quantized, plain))
    torch.testing.assert_close(out, expected, rtol=0.03, atol=0.03)


def kandinsky():
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=8,
        addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(64, 128),
        layers_per_block=1,
        encoder_hid_dim=64,
        encoder_hid_dim_type="image_proj",
        cross_attention_dim=64,
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
        norm_num_groups=8,
    ).eval()


def run(unet, device, seed: int = 0):
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    image = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    with torch.no_grad():
        return unet(
            noise,
            torch.tensor([3], device=device),
            encoder_hidden_states=None,
            added_cond_kwargs={"image_embeds": image},
        ).sample.cpu()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_unet_from_a_checkpoint(gpu, tmp_path, bits):
    plain, device = kandinsky(), gpu.devices[0]
    unet = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits, dtype=torch.float32)
    if bits == 4:
        unet.to(device)
    expected, out = run(plain, "cpu"), run(unet, device)
    error = ((out - expected).norm() / expected.norm()).item()
    assert error < {4: 0.3, 8: 0.05}[bits], f"the output differs by {error:.0%}"
    assert not torch.equal(run(unet, device, seed=1), out), "the output does not depend on the image"


def test_an_error_in_the_layer_leaves_nothing_behind(gpu):
    device = gpu.devices[0]
    quantized, _ = projection(four_bit.linear(device), device)
    layer = quantized.image_embeds
    with torch.no_grad():
        expected = quantized(images(device))
        handle = layer.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantized(images(device))
        handle.remove()
        assert quantized.image_embeds is layer
        assert torch.equal(quantized(images(device)), expected)


def interrupted(*_):
    raise KeyboardInterrupt


def test_in_one_graph():
    for requirement in (ONE_GRAPH["4-bit"], "bitsandbytes>=0.50", "diffusers>=0.32"):
        if reason := unmet(requirement):
            pytest.skip(reason)
    quantized, _ = projection(four_bit.linear("cpu"), "cpu")
    with torch.no_grad():
        expected = quantized(images("cpu"))
        compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(images("cpu")), expected)
