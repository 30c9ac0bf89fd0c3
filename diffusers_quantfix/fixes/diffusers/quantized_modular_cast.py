"""A modular pipeline with quantized components cannot be cast.

Symptom: ``ModularPipeline.to(dtype)`` and ``.to(device, dtype)`` with a GGUF, torchao or quanto model raise ValueError
    "Casting a quantized model to a new `dtype` is unsupported", with some components cast and moved, others not.
Cause: it spares components of bitsandbytes only, and passes the dtype on to all others.
Upstream: not reported.
Cure: a quantized component is moved and not cast, and a warning says so. Twin: ``diffusers-quantized-cast``.
"""

from __future__ import annotations

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
)


def broken(modular_pipeline) -> bool:
    """Whether a quantized component is told to change its dtype."""
    return casting.passes_on_the_cast(resolve(modular_pipeline, "ModularPipeline"))


def mend(modular_pipeline, ledger) -> None:
    logger = modular_pipeline.logger
    ledger.around(
        resolve(modular_pipeline, "ModularPipeline"), "to", lambda original: casting.sparing(original, logger)
    )
    for model in casting.model_classes():
        ledger.around(model, "to", casting.sparing_models)
