"""The pipeline classes that the installed diffusers exports, and which of them cannot be built here."""

from __future__ import annotations

import functools


@functools.cache
def pipelines() -> dict[str, type]:
    """Name -> class of every pipeline that diffusers exports; those with a missing dependency are not among them."""
    import diffusers

    found = {}
    for name in dir(diffusers):
        if "Pipeline" not in name and not name.startswith("SanaWM"):
            continue
        exported = getattr(diffusers, name)
        if isinstance(exported, type) and issubclass(exported, diffusers.DiffusionPipeline):
            found[name] = exported
    del found["DiffusionPipeline"]
    return found


# Pipeline -> why no tiny instance of it runs here.
NOT_BUILT: dict[str, str] = {}
