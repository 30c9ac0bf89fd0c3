"""A checkpoint of quanto weights is loaded by ``torch.distributed.checkpoint``."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from ..models import quanto_models

    model, other = quanto_models.layers("qint8"), quanto_models.layers("qint8")
    for layer in other:
        layer.weight._data.zero_()
    set_model_state_dict(
        other, model.state_dict(), options=StateDictOptions(full_state_dict=True, strict=False)
    )
    expected = quanto_models.run(model)
    assert torch.equal(quanto_models.run(other), expected), "the weights are those from before loading"
    return "the loaded weights are those of the checkpoint"
