"""diffusers-fuse-qkv-quantized: fuse_qkv_projections of a quantized model fails in the middle."""

from __future__ import annotations

import pytest

from tests.fixes import casts, four_bit, quanto_models
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-fuse-qkv-quantized"
SHOWS = (
    "Only Tensors of floating point and complex dtype can require gradients|"
    r"attempting to run unimplemented operator/function.*aten\.cat|"
    "object has no attribute 'tensor_data_names'|must match the size|not implemented for 'Float8"
)
REFUSED = r"projections with packed or 8-bit weights cannot be fused \(\d+ of this"


def assert_refused(model) -> None:
    """It is refused, the model has the layers that it had, and they are the same."""
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=REFUSED):
        model.fuse_qkv_projections()
    assert {name: id(layer) for name, layer in model.named_modules()} == {
        name: id(layer) for name, layer in before.items()
    }
    assert not any(getattr(layer, "fused_projections", False) for layer in before.values())


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("backend", ["gguf", "torchao"])
def test_gguf_and_torchao(tmp_path, backend):
    model = casts.loaded(backend, tmp_path)
    assert_refused(model)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize(
    "options",
    [{"bits": 8}, {"bits": 4}, {"bits": 4, "bnb_4bit_quant_storage": "bfloat16"}],
    ids=["int8", "nf4", "nf4 in bfloat16"],
)
def test_bitsandbytes(gpu, tmp_path, options):
    import torch
    from diffusers import FluxTransformer2DModel

    device = gpu.devices[0]
    models.saved(models.flux_transformer(), tmp_path)
    model = four_bit.load(FluxTransformer2DModel, tmp_path, **options)
    pipe = models.flux_pipeline(model)
    before = models.call_flux(pipe, device)
    assert_refused(model)
    assert torch.equal(models.call_flux(pipe, device), before)


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.33")
def test_layerwise_casting():
    import torch

    model = models.flux_transformer()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert_refused(model)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_with_the_older_attention(gpu, tmp_path):
    from diffusers import UNet2DConditionModel

    models.saved(models.unet(), tmp_path)
    assert_refused(four_bit.load(UNet2DConditionModel, tmp_path))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.35")
def test_an_attention_layer_with_its_own_way_to_fuse(gpu, tmp_path):
    """Wan's; and its first block is not quantized, which upstream has fused when it fails."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=64,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    models.saved(model, tmp_path)
    options = {} if unmet("diffusers>=0.36") else {"llm_int8_skip_modules": ["blocks.0"]}
    assert_refused(four_bit.load(WanTransformer3DModel, tmp_path, **options))


@pytest.mark.parametrize("base", ["flux", "unet"])
def test_what_is_not_quantized_is_fused(base):
    model = models.flux_transformer() if base == "flux" else models.unet()
    model.fuse_qkv_projections()
    assert any(name.endswith("to_qkv") for name, _ in model.named_modules())


def test_quanto_weights_are_fused(tmp_path):
    if unmet("optimum-quanto>=0.2.6") or unmet("diffusers>=0.33"):
        pytest.skip("these releases load no model with quanto weights")
    model = quanto_models.load_flux(quanto_models.saved_flux(tmp_path), "int8")
    before = quanto_models.run_flux(model)
    model.fuse_qkv_projections()
    assert quanto_models.error(quanto_models.run_flux(model), before) < 1e-3


def test_a_layer_by_itself(tmp_path):
    model = casts.loaded("gguf", tmp_path)
    with pytest.raises(ValueError, match=REFUSED):
        model.transformer_blocks[0].attn.fuse_projections()
