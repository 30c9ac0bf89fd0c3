"""A T5 encoder that quanto quantized is cast."""

from __future__ import annotations


def case(work: str) -> str | None:
    import os

    from ..models import quanto_models

    model = quanto_models.t5(os.path.join(work, "t5"), "int8")
    before = [parameter.dtype for parameter in model.parameters()]
    try:
        model.bfloat16()
    except ValueError as error:
        message = str(error)
    else:
        message = "nothing"
    after = [parameter.dtype for parameter in model.parameters()]
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    assert not changed, f"{changed} of {len(before)} weights were cast, then: {message}"
    return "refused before anything was changed"
