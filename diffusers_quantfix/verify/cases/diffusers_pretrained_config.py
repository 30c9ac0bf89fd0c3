"""A model that keeps a module in float32 is loaded with a quanto config that skips another."""

from __future__ import annotations


def case(work: str) -> str | None:
    from unittest import mock

    from diffusers import FluxTransformer2DModel

    from ..models import quanto_models

    skipped = ["proj_out"]
    with mock.patch.object(FluxTransformer2DModel, "_keep_in_fp32_modules", ["norm1"]):
        quanto_models.flux(work, "int8", kept=skipped)
    assert skipped == ["proj_out"], f"the list is {skipped}"
    return "the list is as it was"
