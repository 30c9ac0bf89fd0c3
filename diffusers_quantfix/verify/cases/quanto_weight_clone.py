"""Models with quanto weights are deep-copied."""

from __future__ import annotations


def case(work: str) -> str | None:
    import copy

    import torch

    from ..models import quanto_models

    for qtype in quanto_models.QTYPES:
        model = quanto_models.layers(qtype)
        twin = copy.deepcopy(model)
        assert type(twin[0].weight) is type(model[0].weight), (
            f"the weight of the copy is a {type(twin[0].weight).__name__}"
        )
        assert torch.equal(quanto_models.run(twin), quanto_models.run(model)), (
            f"{qtype}: the output of the copy differs"
        )
    return f"deep copies with {', '.join(quanto_models.QTYPES)} have the same output"
