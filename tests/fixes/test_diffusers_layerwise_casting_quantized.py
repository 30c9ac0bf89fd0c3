"""diffusers-layerwise-casting-quantized: layerwise casting casts the packed bytes of quantized weights."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q
from tests.gate import unmet
from tests.rig import models

FIX_ID = "diffusers-layerwise-casting-quantized"
pytest.importorskip("diffusers", reason="diffusers is not installed")
if unmet("diffusers>=0.33"):
    pytest.skip("layerwise casting: from 0.33 on", allow_module_level=True)


def four_bit_layers(storage):
    """Two 4-bit layers and a plain one, on the CPU."""
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    if unmet("bitsandbytes>=0.46"):
        pytest.skip("bitsandbytes quantizes on a CPU from 0.46 on")
    torch.manual_seed(0)
    options = {"quant_type": "nf4", "compute_dtype": torch.bfloat16, "quant_storage": storage}
    layers = [bnb.nn.Linear4bit(64, 64, **options) for _ in range(2)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 64, dtype=torch.bfloat16)).to("cpu")
    try:
        call(model, torch.bfloat16)
    except RuntimeError as error:
        if "only supports uint8 storage" not in str(error):
            raise
        pytest.skip(f"bitsandbytes: {error}")
    return model.requires_grad_(False)


def call(layers, dtype, width: int = 64):
    import torch

    torch.manual_seed(2)
    with torch.no_grad():
        return layers(torch.randn(3, width, dtype=dtype))


@pytest.mark.defect(FIX_ID, shows="off by|is invalid for input of size|must match the size of tensor")
@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_4bit_weights_in_floating_storage(storage, mode):
    import torch
    from diffusers.hooks import apply_layerwise_casting

    model = four_bit_layers(getattr(torch, storage))
    expected = call(model[:2], torch.bfloat16)
    apply_layerwise_casting(model, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    assert model[2].weight.dtype == torch.float8_e4m3fn, "the plain layer is cast as ever"
    with getattr(torch, mode)():
        for _ in range(2):
            off = (call(model[:2], torch.bfloat16) - expected).abs().max().item()
            assert off == 0, f"off by {off}"
            call(model, torch.bfloat16)
    assert model[0].weight.dtype == getattr(torch, storage)


@pytest.mark.defect(FIX_ID, shows=r"ValueError|off by")
@pytest.mark.parametrize("qtype", q.QTYPES)
def test_weights_of_quanto(qtype):
    import torch
    from diffusers.hooks import apply_layerwise_casting

    model = torch.nn.Sequential(*q.layers(qtype), torch.nn.Linear(128, 8))
    expected = call(model[:2], torch.float32, 256)
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32)
    off = (call(model[:2], torch.float32, 256) - expected).abs().max().item()
    assert off == 0, f"off by {off}"
    assert model[2].weight.dtype == torch.float8_e4m3fn


@pytest.mark.defect(FIX_ID, shows=r"AssertionError|off by")
@pytest.mark.parametrize("storage", ["float8_e4m3fn", "float16"])
def test_weights_of_torchao_with_few_bits(storage):
    """Their scales are bfloat16 numbers too small for float16."""
    import torch
    from diffusers.hooks import apply_layerwise_casting

    quantization = pytest.importorskip("torchao.quantization")
    if unmet("torchao>=0.18"):
        pytest.skip("IntxWeightOnlyConfig of older releases makes another tensor")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)))
    model.requires_grad_(False)[0].weight.mul_(2**-12)
    quantization.quantize_(
        model, quantization.IntxWeightOnlyConfig(), filter_fn=lambda layer, name: layer is model[0]
    )
    expected = call(model[0], torch.bfloat16)
    apply_layerwise_casting(model, storage_dtype=getattr(torch, storage), compute_dtype=torch.bfloat16)
    assert model[1].weight.dtype == getattr(torch, storage), "the plain layer is cast as ever"
    for _ in range(2):
        off = (call(model[0], torch.bfloat16) - expected).abs().max().item()
        assert off == 0, f"off by {off}"


def test_weights_in_bytes_are_upstreams_business():
    """uint8, the default: the hook leaves them alone by itself, and casts the bias."""
    import torch
    from diffusers.hooks import apply_layerwise_casting

    model = four_bit_layers(torch.uint8)
    expected = call(model[:2], torch.bfloat16)
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16)
    assert model[0].bias.dtype == torch.float8_e4m3fn
    assert (call(model[:2], torch.bfloat16) - expected).abs().max() < 0.1


def test_a_whole_model_is_refused_before_anything_is_cast():
    import torch
    from diffusers.hooks import apply_layerwise_casting

    model = four_bit_layers(torch.bfloat16)
    expected = call(model, torch.bfloat16)
    with pytest.raises(ValueError, match="packed weights of 2 quantized layers; pass skip_modules_pattern"):
        apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=None)
    assert torch.equal(call(model, torch.bfloat16), expected)


def test_a_model_of_diffusers(tmp_path):
    """As the documentation says it, and with a LoRA beside."""
    import torch

    transformer = q.load_flux(q.saved_flux(tmp_path / "flux"), "int8", torch.bfloat16)
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    output = models.call_flux(models.flux_pipeline(transformer), "cpu", torch.bfloat16)
    assert torch.isfinite(output.float()).all()
