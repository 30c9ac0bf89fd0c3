"""A GGUF transformer for tests."""

from __future__ import annotations

import pytest

from diffusers_quantfix.verify.case import CannotReproduce
from diffusers_quantfix.verify.models import gguf_model
from tests.rig import models


def transformer(folder, **options):
    """The transformer that verify writes and loads; skips where these releases have none."""
    try:
        return gguf_model.flux(str(folder), **options)
    except CannotReproduce as reason:
        pytest.skip(str(reason))


def run(transformer, device="cpu"):
    """The latents of one run of a Flux pipeline with ``transformer``, on the CPU."""
    import torch

    return models.call_flux(models.flux_pipeline(transformer), device=device, dtype=torch.float32).cpu()


def weights_of(model) -> list:
    """The GGUF weights of a model."""
    return [parameter for parameter in model.parameters() if type(parameter).__name__ == "GGUFParameter"]
