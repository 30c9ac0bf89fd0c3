"""A GGUF model that keeps a module in float32 is loaded with a config that skips another."""

from __future__ import annotations


def case(work: str) -> str | None:
    from unittest import mock

    import torch
    from diffusers import FluxTransformer2DModel

    from ..models import gguf_model

    skipped = ["proj_out"]
    with mock.patch.object(FluxTransformer2DModel, "_keep_in_fp32_modules", ["norm1"]):
        gguf_model.flux(work, torch.float16, skipped)
    assert skipped == ["proj_out"], f"the list is {skipped}"
    return "the list is as it was"
