"""A modular pipeline with quantized components cannot be cast.

Symptom: ``ModularPipeline.to(dtype)`` and ``.to(device, dtype)`` with a GGUF, torchao or quanto model raise ValueError
    "Casting a quantized model to a new `dtype` is unsupported", with some components cast and moved, others not.
Cause: it skips the cast for bitsandbytes components only, and passes the dtype on to all others.
Upstream: not reported.
Patch: a quantized component is moved and not cast, with a warning. Twin: ``diffusers-quantized-cast``.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models import casting

FIX = Fix(
    id="diffusers-quantized-modular-cast",
    title="modular pipelines with GGUF, torchao or quanto components cannot be cast",
    module="diffusers.modular_pipelines.modular_pipeline",
    claims={"diffusers": ">=0.35.0,<=0.42.1"},
    upstream=(),
    symptom="ModularPipeline.to(dtype): Casting a quantized model to a new `dtype` is unsupported",
    patterns=("Casting a quantized model to a new dtype is unsupported",),
    frames=("modular_pipeline.py:to", r"Modular\w*Pipeline", "modular"),
)


def broken(modular_pipeline: ModuleType) -> bool:
    """Whether a quantized component is told to change its dtype."""
    return casting.passes_on_the_cast(resolve(modular_pipeline, "ModularPipeline"))


def patch(modular_pipeline: ModuleType, draft: Draft) -> None:
    logger = modular_pipeline.logger
    draft.wrap_plain(
        resolve(modular_pipeline, "ModularPipeline"), "to", lambda original: casting.sparing(original, logger)
    )
    for model in casting.model_classes():
        draft.wrap_plain(model, "to", casting.sparing_models)
