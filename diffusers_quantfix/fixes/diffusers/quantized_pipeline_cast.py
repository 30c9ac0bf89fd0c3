"""Pipelines with GGUF, torchao or quanto components cannot be cast, and are left half cast.

Symptom: ``to(dtype)`` and ``to(device, dtype)`` of a pipeline or modular pipeline with a GGUF, torchao or quanto model
    raise ValueError "Casting a quantized model to a new `dtype` is unsupported", with some components cast and moved,
    others not. With a transformers text encoder it is "The dtype of a weights Tensor cannot be changed" (quanto),
    midway through the encoder, or the encoder is silently left half cast (torchao).
Cause: ``DiffusionPipeline.to`` and ``ModularPipeline.to`` skip the cast only for bitsandbytes components, and pass the
    dtype on to all others.
Upstream: not reported.
Patch: a component quantized by any library is moved but not cast, with a warning, as upstream does for bitsandbytes.
    ``model.to(dtype)`` on a quantized model itself still raises.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...models import casting

_CLASSES = {"pipeline_utils": "DiffusionPipeline", "modular_pipeline": "ModularPipeline"}

FIX = Fix(
    __doc__,
    id="diffusers-quantized-pipeline-cast",
    targets=(
        Target(
            "diffusers-quantized-cast",
            "diffusers.pipelines.pipeline_utils",
            {"diffusers": ">=0.31.0,<=0.42.1"},
        ),
        Target(
            "diffusers-quantized-modular-cast",
            "diffusers.modular_pipelines.modular_pipeline",
            {"diffusers": ">=0.35.0,<=0.42.1"},
        ),
    ),
    patterns=(
        "Casting a quantized model to a new (dtype )?is unsupported",
        r"The dtype of a \w* ?weights Tensor cannot be changed",
        r"WeightQ\w+Tensor cannot be changed",
    ),
    frames=(
        "pipelines/pipeline_utils.py:to",
        "modular_pipeline.py:to",
        r"pipe\w*\.to\(|Modular\w*Pipeline",
    ),
    asked_once=True,
)


def broken(module: ModuleType) -> bool:
    """Whether a quantized component is told to change its dtype."""
    return casting.passes_on_the_cast(_pipeline(module))


def patch(module: ModuleType, draft: Draft) -> None:
    logger = module.logger
    draft.wrap_plain(_pipeline(module), "to", lambda original: casting.sparing(original, logger))
    for model in casting.model_classes():
        draft.wrap_plain(model, "to", casting.sparing_models)


def _pipeline(module: ModuleType) -> type:
    cls: type = resolve(module, _CLASSES[module.__name__.rpartition(".")[2]])
    return cls
