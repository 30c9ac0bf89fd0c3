"""A model with weights of quanto is put into shared memory: a segmentation fault without the fix."""

from __future__ import annotations

MAY_CRASH = True


def case(work: str) -> str | None:
    from ..models import quanto_models, shared_memory

    for qtype in quanto_models.QTYPES:
        said = shared_memory.outputs_stay(quanto_models.layers(qtype), quanto_models.run)
    return said
