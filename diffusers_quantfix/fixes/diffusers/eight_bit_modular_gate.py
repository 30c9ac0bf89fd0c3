"""Modular pipelines do not move their 8-bit components.

Symptom: the warning "has been loaded in `bitsandbytes` 8bit and moving it to cpu via `.to()` is not supported. Module
    is still on" after ``pipe.to("cpu")`` of a ``ModularPipeline``, and the component stays on the GPU.
Cause: ``ModularPipeline.to`` skips 8-bit components in every release; PR 12972 changed only ``DiffusionPipeline.to``.
Upstream: https://github.com/huggingface/diffusers/pull/12972.
Patch: ``to`` also moves the 8-bit components that can move completely (``bnb-linear8bit-move``).
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve, texts_of
from ...models import eight_bit_pipeline

FIX = Fix(
    __doc__,
    id="diffusers-8bit-modular-gate",
    module="diffusers.modular_pipelines.modular_pipeline",
    claims={"diffusers": ">=0.35.0,<=0.42.1", "bitsandbytes": ">=0.43.0"},
    patterns=("has been loaded in (bitsandbytes )?8bit and moving it to .{1,20} is not supported",),
    frames=("modular_pipeline.py:to", r"Modular\w*Pipeline", "modular"),
    asked_once=True,
)


def broken(modular_pipeline: ModuleType) -> bool:
    """Look for the error message."""
    to = resolve(modular_pipeline, "ModularPipeline.to")
    return eight_bit_pipeline.REFUSAL in texts_of(to)


def patch(modular_pipeline: ModuleType, draft: Draft) -> None:
    eight_bit_pipeline.moves_all(modular_pipeline, "ModularPipeline", draft)
