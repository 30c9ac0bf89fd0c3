"""diffusers-adapter-dtype: the dtype of a quantized model without biases is that of its LoRA."""

from __future__ import annotations

import pytest

from tests.fixes.models_without_biases import layers, quantized, with_lora
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")  # peft takes it for imported
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("diffusers")
pytest.importorskip("bitsandbytes")

if unmet("diffusers>=0.32"):
    pytest.skip("before diffusers 0.32 a dtype is that of the first parameter", allow_module_level=True)

FIX_ID = "diffusers-adapter-dtype"
SHOWS = r"torch.(float32|u?int8) == torch.(bfloat16|float32)"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_dtype_of_a_model_with_a_lora(gpu, tmp_path, bits):
    kind = layers()
    model = quantized(kind, kind(), gpu, tmp_path, bits)
    assert model.dtype == torch.bfloat16
    with_lora(model)
    assert model.dtype == torch.bfloat16
    x = torch.randn(2, 64, device=gpu.devices[0]).to(model.dtype)
    assert model(x).dtype == torch.bfloat16
    model.delete_adapters("default")
    assert model.dtype == torch.bfloat16


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.33.1",))
@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.bfloat16), (8, torch.float32)])
def test_the_dtype_of_a_model_whose_norms_are_kept_in_float32(gpu, tmp_path, bits, dtype):
    """As Flux.3: no other parameter floats."""
    kind = layers(kept=["norm"])
    model = quantized(kind, kind(), gpu, tmp_path, bits)
    assert model.norm.weight.dtype == torch.float32
    assert model.dtype == dtype


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("diffusers>=0.36",))
def test_flux_2(gpu, tmp_path):
    from diffusers import Flux2Transformer2DModel

    plain = Flux2Transformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    model = quantized(Flux2Transformer2DModel, plain, gpu, tmp_path)
    weights = {
        f"transformer.transformer_blocks.0.attn.to_q.lora_{half}.weight": torch.randn(shape)
        for half, shape in (("A", (2, 32)), ("B", (32, 2)))
    }
    model.load_lora_adapter(weights, adapter_name="one")
    assert next(p.dtype for name, p in model.named_parameters() if "lora" in name) == torch.float32
    assert model.dtype == torch.bfloat16


def test_an_adapter_alone_answers_for_itself(gpu, tmp_path):
    """No other parameter floats: upstream's answer stands."""
    kind = layers(norm=False)
    assert with_lora(quantized(kind, kind(), gpu, tmp_path)).dtype == torch.float32


@pytest.mark.defect(FIX_ID, shows="torch.float32 == torch.bfloat16")
def test_an_adapter_of_4_bit_weights_alone(gpu, tmp_path):
    """What else floats is kept in float32, or nothing does: the dtype is that which the 4-bit weights had."""
    kind = layers(norm=False)
    assert with_lora(quantized(kind, kind(), gpu, tmp_path, 4)).dtype == torch.bfloat16


def test_a_model_without_a_parameter_is_asked_as_ever():
    from diffusers.models.modeling_utils import get_parameter_dtype

    try:
        assert get_parameter_dtype(torch.nn.Identity()) is None
    except UnboundLocalError:  # its annotation names `tuple`, which it assigns below
        pytest.skip("this diffusers cannot answer")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_is_asked_as_ever(dtype):
    kind = layers()
    model = with_lora(kind().to(torch.bfloat16), dtype)
    assert model.dtype == torch.bfloat16


@pytest.mark.skipif(bool(unmet("diffusers>=0.33")), reason="layerwise casting came with diffusers 0.33")
def test_a_model_that_is_cast_layer_by_layer_is_asked_as_ever():
    model = with_lora(layers()())
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert model.dtype == torch.float32
