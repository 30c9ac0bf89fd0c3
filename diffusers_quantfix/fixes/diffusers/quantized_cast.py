"""A pipeline with quantized components cannot be cast.

Symptom: ``pipe.to(dtype)`` and ``pipe.to(device, dtype)`` with a GGUF, torchao or quanto model raise ValueError
    "Casting a quantized model to a new `dtype` is unsupported", with some components cast and moved, others not. With
    a text encoder of transformers it is "The dtype of a weights Tensor cannot be changed" (quanto) in the middle of
    the encoder, or the encoder is silently half cast (torchao).
Cause: ``DiffusionPipeline.to`` skips the cast for bitsandbytes components only, and passes the dtype on to all others.
Upstream: not reported.
Patch: a quantized component of any library is moved and not cast, with a warning, as upstream does for bitsandbytes.
    ``model.to(dtype)`` on a quantized model itself still raises.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models import casting

FIX = Fix(
    id="diffusers-quantized-cast",
    title="pipelines with GGUF, torchao or quanto components cannot be cast, and are left half cast",
    module="diffusers.pipelines.pipeline_utils",
    claims={"diffusers": ">=0.31.0,<=0.42.1"},
    upstream=(),
    symptom="pipe.to(dtype): Casting a quantized model to a new `dtype` is unsupported",
    patterns=(
        "Casting a quantized model to a new dtype is unsupported",
        r"The dtype of a \w* ?weights Tensor cannot be changed",
        r"WeightQ\w+Tensor cannot be changed",
    ),
    frames=("pipelines/pipeline_utils.py:to", r"pipe\w*\.to\("),
)


def broken(pipeline_utils: ModuleType) -> bool:
    """Whether a quantized component is told to change its dtype."""
    return casting.passes_on_the_cast(resolve(pipeline_utils, "DiffusionPipeline"))


def patch(pipeline_utils: ModuleType, draft: Draft) -> None:
    logger = pipeline_utils.logger
    pipeline = resolve(pipeline_utils, "DiffusionPipeline")
    draft.wrap_plain(pipeline, "to", lambda original: casting.sparing(original, logger))
    for model in casting.model_classes():
        draft.wrap_plain(model, "to", casting.sparing_models)
