"""diffusers-packed-dtype: the dtype of a quantized model is that of its packed weights."""

from __future__ import annotations

import pytest

from tests.fixes.models_without_biases import layers, quantized, with_lora
from tests.rig import models

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("bitsandbytes")

FIX_ID = "diffusers-packed-dtype"
SHOWS = r"torch.u?int8 == torch.(bfloat16|float32)|not implemented for 'Byte'"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_dtype_of_a_model_whose_first_layer_is_quantized(gpu, tmp_path, bits):
    kind = layers()
    model = quantized(kind, kind(), gpu, tmp_path, bits)
    assert model.dtype == torch.bfloat16
    x = torch.randn(2, 64, device=gpu.devices[0]).to(model.dtype)
    assert model(x).dtype == torch.bfloat16


@pytest.mark.defect("diffusers-adapter-dtype", shows=SHOWS + "|torch.float32 == torch.bfloat16")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("bits", [4, 8])
def test_with_a_lora(gpu, tmp_path, bits):
    pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
    pytest.importorskip("peft", reason="peft is not installed")
    kind = layers()
    model = with_lora(quantized(kind, kind(), gpu, tmp_path, bits))
    assert next(one.dtype for name, one in model.named_parameters() if "lora_" in name) == torch.float32
    assert model.dtype == torch.bfloat16


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_amused(gpu, tmp_path):
    """Its transformer casts the pooled embeddings of the text to its own dtype."""
    from diffusers import UVit2DModel

    plain = UVit2DModel(
        hidden_size=32,
        use_bias=False,
        hidden_dropout=0.0,
        cond_embed_dim=32,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=32,
        vocab_size=32,
        codebook_size=8,
        in_channels=32,
        block_out_channels=32,
        num_res_blocks=1,
        downsample=True,
        upsample=True,
        block_num_heads=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        attention_dropout=0.0,
        intermediate_size=32,
        layer_norm_eps=1e-6,
        ln_elementwise_affine=True,
    )
    device = gpu.devices[0]
    model = quantized(UVit2DModel, plain, gpu, tmp_path, 4)
    generator = torch.Generator().manual_seed(0)
    text, pooled = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in ((1, 4, 32), (1, 32))
    )
    with torch.no_grad():
        output = model(
            torch.zeros(1, 4, 4, dtype=torch.long, device=device),
            text,
            pooled_text_emb=pooled,
            micro_conds=torch.zeros(1, 5, device=device),
        )
    assert output.dtype == torch.bfloat16
    assert bool(output.isfinite().all())


def test_a_plain_model_is_asked_as_ever():
    assert models.flux_transformer().to(torch.float16).dtype == torch.float16
