"""The state dict of an 8-bit model as torch.distributed.checkpoint reads it."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    from ..models import eight_bit

    where = eight_bit.device()
    source, model = eight_bit.layers(where), eight_bit.layers(where)
    reference = eight_bit.run(source, where)
    with torch.no_grad():
        model[0].weight.zero_()
    set_model_state_dict(model, get_model_state_dict(source))
    assert torch.equal(eight_bit.run(model, where), reference), "the output is not that of the checkpoint"
    return "saved and loaded; output exact"
