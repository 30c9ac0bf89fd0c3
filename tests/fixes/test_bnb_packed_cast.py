"""bnb-packed-cast: a cast of a model rounds the packed bytes of 4-bit weights in a floating dtype."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

FIX_ID = "bnb-packed-cast"
SHOWS = r"off by|is invalid for input of size|must match the size of tensor"
CASTS = ("bfloat16", "double", "to", "to keyword", "type")


def cast(model, how: str):
    """Cast as a user spells it, and return the dtype."""
    import torch

    if how == "double":
        model.double()
        return torch.float64
    if how == "bfloat16":
        model.bfloat16()
    elif how == "to keyword":
        model.to(dtype=torch.bfloat16)
    else:
        getattr(model, how)(torch.bfloat16)
    return torch.bfloat16


def weights(layer):
    """The numbers that the packed bytes stand for, on the CPU."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().cpu()


def check_unchanged(layer, expected, storage) -> None:
    off = (weights(layer) - expected).abs().max().item()
    assert off == 0, f"off by {off}"
    assert layer.weight.dtype == storage
    assert layer.weight.quant_state is layer.quant_state
    assert layer.weight.bnb_quantized


@pytest.mark.parametrize("storage", ["float16", "float32"])
@pytest.mark.parametrize("how", CASTS)
@pytest.mark.parametrize("double_quant", [False, True], ids=["nf4", "nf4-double"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_module_above_is_cast(gpu, storage, how, double_quant):
    """As ``PeftModel.to`` does it: the layer is told by the module above."""
    import torch

    storage = getattr(torch, storage)
    model = four_bit.stack(gpu.devices[0], double_quant=double_quant, quant_storage=storage)
    expected = weights(model[0])
    dtype = cast(model, how)
    check_unchanged(model[0], expected, storage)
    assert model[1].weight.dtype == model[0].bias.dtype == dtype


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_moved_and_cast_at_once(gpu):
    import torch

    here, there = gpu.pair
    model = four_bit.stack(here, quant_storage=torch.float16)
    reference = four_bit.run(model, here)
    expected = weights(model[0])
    model.to(there, torch.bfloat16)
    check_unchanged(model[0], expected, torch.float16)
    four_bit.assert_whole(model, there)
    with torch.no_grad():
        again = model(four_bit.batch(there).bfloat16()).float().cpu()
    assert (again - reference).abs().max() < 0.02 * reference.abs().max()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_an_embedding(gpu):
    import torch

    nn = pytest.importorskip("bitsandbytes.nn")
    if not hasattr(nn, "Embedding4bit"):
        pytest.skip("Embedding4bit came with bitsandbytes 0.44.0")
    torch.manual_seed(0)
    layer = nn.Embedding4bit(64, 64, quant_storage=torch.float16).to(gpu.devices[0])
    expected = weights(layer)
    torch.nn.Sequential(layer).bfloat16()
    off = (weights(layer) - expected).abs().max().item()
    assert off == 0, f"off by {off}"


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_loaded_model(gpu, tmp_path, library):
    """``bfloat16`` is not refused, as ``half`` and ``float`` are."""
    import torch

    pytest.importorskip(library)
    if library == "diffusers":
        from diffusers import FluxTransformer2DModel as Model

        models.flux_transformer().save_pretrained(tmp_path)
    else:
        from transformers import T5EncoderModel as Model

        models.t5_encoder().save_pretrained(tmp_path)
    model = four_bit.load(Model, tmp_path, bnb_4bit_quant_storage=torch.float16)
    layers = [layer for layer in model.modules() if type(layer).__name__ == "Linear4bit"]
    expected = [weights(layer) for layer in layers]
    model.bfloat16()
    assert layers
    for layer, before in zip(layers, expected, strict=True):
        off = (weights(layer) - before).abs().max().item()
        assert off == 0, f"off by {off}"


def test_bytes_and_weights_before_they_are_packed_are_upstreams_business(gpu):
    import torch
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 64, quant_storage=torch.float16).bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    layer.to(gpu.devices[0])
    assert layer.weight.dtype == torch.float16
    model = four_bit.stack(gpu.devices[0])
    expected = weights(model[0])
    check_unchanged(model.half()[0], expected, torch.uint8)
