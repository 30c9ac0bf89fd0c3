"""Pipelines for the tests of the tools: tiny, saved and loaded the way a user does it."""

from __future__ import annotations

import pytest

from tests.rig import models


def flux(tmp_path, bits: int | None = None, text: bool = False, device=None, **config):
    """A Flux pipeline; its transformer is loaded in 4 or 8 bits, the rest is put on ``device`` in float16."""
    import torch
    from diffusers import FluxTransformer2DModel

    whole = models.flux_transformer(**config)
    if bits is None:
        pipeline = models.flux_pipeline(whole.to(torch.float16), text=text)
    else:
        pipeline = models.flux_pipeline(
            load(FluxTransformer2DModel, models.saved(whole, tmp_path / "t"), bits), text=text
        )
    for name in ("vae", "text_encoder", "text_encoder_2", "transformer"):
        component = getattr(pipeline, name)
        if component is not None and device is not None and not (bits and name == "transformer"):
            component.to(device, torch.float16)
    return pipeline


def load(model_class, folder, bits: int, **options):
    """Load quantized; skips where these releases cannot."""
    try:
        return models.load_quantized(model_class, folder, bits=bits, **options)
    except ValueError as error:
        if "`.to` is not supported for `8-bit`" in str(error):
            pytest.skip("these releases cannot load 8-bit models (diffusers-8bit-model-gate)")
        raise


def strip_companions(transformer, device):
    """Leave the companions of one quantized layer on ``device``, as the broken releases do; returns its name."""
    import torch

    from diffusers_quantfix.weights.companions import companions

    for name, module in transformer.named_modules():
        found = [c for c in companions(module) if c.tensor.numel()]
        if found:
            for companion in found:
                setattr(companion.holder, companion.attribute, companion.tensor.to(torch.device(device)))
            return name
    raise AssertionError("nothing is quantized")
