"""Tiny 8-bit models and pipelines for the tests of the gates."""

from __future__ import annotations

import logging

import pytest

from tests.fixes import four_bit
from tests.rig import models

REFUSED = r"`\.?(to|cuda)(\(\))?`,? is not supported for `8-bit`|is not supported for `4-bit` or `8-bit`|" \
    r"is not supported for `8-bit` quantized models"  # fmt: skip


def transformer(folder, side, device_map=None):
    """A FluxTransformer2DModel in 8 bits; skips on the bare side where none loads (``diffusers-8bit-model-gate``)."""
    from diffusers import FluxTransformer2DModel

    models.saved(models.flux_transformer(), folder)
    return _loaded(FluxTransformer2DModel, folder, side, device_map)


def _loaded(model_class, folder, side, device_map=None):
    try:
        return models.load_quantized(model_class, folder, bits=8, device_map=device_map)
    except ValueError as error:
        if side == "bare" and "`.to` is not supported for `8-bit`" in str(error):
            pytest.skip("no 8-bit model of diffusers loads here (diffusers-8bit-model-gate)")
        raise


def unet(folder, side):
    """A UNet2DConditionModel in 8 bits; skips as ``transformer`` does."""
    from diffusers import UNet2DConditionModel

    models.saved(models.unet(), folder)
    return _loaded(UNet2DConditionModel, folder, side)


def denoise(model, device):
    """The output of a UNet for fixed inputs on ``device``, on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    latents, text = (torch.randn(shape, generator=generator) for shape in ((1, 4, 8, 8), (1, 4, 64)))
    with torch.no_grad():
        return model(latents.to(device).half(), 1, text.to(device).half()).sample.cpu()


def text_encoder(folder, device_map=None):
    """A T5EncoderModel in 8 bits; skips where transformers wants a newer bitsandbytes."""
    from transformers import T5EncoderModel

    models.saved(models.t5_encoder(), folder)
    try:
        return models.load_quantized(T5EncoderModel, folder, bits=8, device_map=device_map or {"": 0})
    except ImportError as refusal:
        pytest.skip(f"transformers: {refusal}")


def encode(model, device):
    """The output of a text encoder."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([[1, 5, 7, 9]], device=device))[0].cpu()


def assert_saved_whole(library, folder, device):
    """A model of diffusers or transformers in 8 bits that has run computes the same once it was saved and loaded."""
    import torch

    whole = models.flux_transformer() if library == "diffusers" else models.t5_encoder()
    with four_bit.skip_for_other_reasons():
        model = models.load_quantized(type(whole), models.saved(whole, folder / "whole"), bits=8)

    def output(model):
        if library == "transformers":
            return encode(model, device)
        return models.call_flux(models.flux_pipeline(model), device).cpu()

    reference = output(model)
    model.save_pretrained(folder / "saved")
    again = type(whole).from_pretrained(folder / "saved", torch_dtype=torch.float16)
    assert torch.equal(output(again), reference), "the output changed"


def warnings_of(call, logger: str = "diffusers") -> str:
    """What ``logger`` says while ``call`` runs."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    where = logging.getLogger(logger)
    where.addHandler(handler)
    try:
        call()
    finally:
        where.removeHandler(handler)
    return "\n".join(record.getMessage() for record in records)
