"""peft-, diffusers- and transformers-int8-tiles-dequantized: 8-bit weights that are in tiles are dequantized."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.fixes import eight_bit_models
from tests.rig import models


def mark(fix_id, needs):
    return pytest.mark.defect(fix_id, shows="the dequantized weight is off", needs=needs)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(
            "peft.utils.integrations", marks=mark("peft-int8-tiles-dequantized", needs="peft>=0.14")
        ),
        pytest.param(
            "diffusers.quantizers.bitsandbytes.utils",
            marks=mark("diffusers-int8-tiles-dequantized", needs="diffusers>=0.33"),
        ),
        pytest.param(
            "transformers.integrations.bitsandbytes",
            marks=mark("transformers-int8-tiles-dequantized", needs="transformers>=4.48"),
        ),
    ],
)
@pytest.mark.parametrize("sizes", [(64, 64), (48, 24)], ids=["whole tiles", "part of a tile"])
def test_a_layer_that_has_run(gpu, module, sizes):
    import torch
    from bitsandbytes.nn import Linear8bitLt

    module = importlib.import_module(module)
    if module.__name__.startswith("transformers") and not hasattr(module, "bnb"):
        pytest.skip("this transformers wants a newer bitsandbytes")
    here = gpu.devices[0]
    torch.manual_seed(0)
    layer = Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0).half().to(here)
    rows, scales = layer.weight.data.clone(), layer.weight.SCB.clone()
    with torch.no_grad():
        output = layer(torch.randn(3, sizes[0]).half().to(here))
    # transformers asks for a dtype from some release on, and no longer from a later one
    options = {"dtype": torch.float32, "state": layer.state}
    known = inspect.signature(module.dequantize_bnb_weight).parameters
    for _ in range(2):
        weight = module.dequantize_bnb_weight(
            layer.weight, **{name: options[name] for name in options.keys() & known.keys()}
        )
        assert weight.shape == rows.shape, "the dequantized weight is off: its shape"
        off = (weight.float() - rows.float() * scales.view(-1, 1) / 127).abs().max().item()
        assert off < 1e-3, f"the dequantized weight is off by {off}"
    with torch.no_grad():
        assert layer(torch.randn(3, sizes[0]).half().to(here)).shape == output.shape


@mark("diffusers-int8-tiles-dequantized", needs="diffusers>=0.33")
def test_dequantize_of_a_model_that_has_run(gpu, tmp_path, side):
    expected = eight_bit_models.transformer(tmp_path, side)
    expected.dequantize()
    model = eight_bit_models.transformer(tmp_path, side)
    models.call_flux(models.flux_pipeline(model))
    model.dequantize()
    for (name, one), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        off = (one.float() - other.float()).abs().max()
        assert off < 1e-3, f"the dequantized weight is off by {off}: {name}"
