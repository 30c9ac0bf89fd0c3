"""A bfloat16 model gets int4 weights on the CPU."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import quanto_models

    try:
        output = quanto_models.run(quanto_models.layers("qint4", torch.bfloat16), torch.bfloat16)
    except NotImplementedError as error:  # torch's message lists every backend
        raise NotImplementedError(str(error).partition(". ")[0]) from None
    off = quanto_models.error(output, quanto_models.run(quanto_models.plain_layers()))
    assert off < 0.35, f"relative error {off:.3f}"
    return f"int4 weights in bfloat16 run on the CPU; relative error {off:.3f}"
